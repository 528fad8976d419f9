"""The vector kernels of the quantized cache, compiled alone: every instruction set that this processor has."""
