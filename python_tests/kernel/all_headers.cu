// Every header of the device code in one translation unit: for editors, and compiled by test_headers.py, which also
// checks that the list is complete. The build of ONNX Runtime does not see this file.

#include "contrib_ops/cuda/bert/kv_cache_quant/activation.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/codec.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/format.h"
#include "contrib_ops/cuda/bert/kv_cache_quant/launch.h"
#include "contrib_ops/cuda/bert/kv_cache_quant/mma.cuh"
#include "contrib_ops/cuda/bert/kv_cache_quant/params.h"
#include "contrib_ops/cuda/bert/kv_cache_quant/plan.h"
#include "contrib_ops/cuda/bert/kv_cache_quant/unit.cuh"
