"""The public reports that the tests named test_report_NN answer, by number.

A report is a repository and the numbers of its issues or pull requests.
"""

from __future__ import annotations

Report = tuple[str, tuple[int, ...]]

REPORTS: dict[int, tuple[Report, ...]] = {
    1: (("microsoft/onnxruntime", (28031,)),),
    2: (("microsoft/onnxruntime", (28277,)),),
    3: (("microsoft/onnxruntime", (28259,)),),
    4: (("microsoft/onnxruntime", (29240,)),),
    5: (("microsoft/onnxruntime", (29447,)),),
    6: (("microsoft/onnxruntime", (31641,)),),
    7: (("microsoft/onnxruntime", (20521,)),),
    8: (("microsoft/onnxruntime", (27079, 27108)),),
    10: (("microsoft/onnxruntime", (29177,)),),
    11: (("microsoft/onnxruntime", (29706, 32446)),),
    12: (("NVIDIA/TensorRT-LLM", (6573,)),),
    13: (("NVIDIA/TensorRT-LLM", (18244, 17964)),),
    14: (("microsoft/onnxruntime", (28388, 28376)),),
    15: (("microsoft/onnxruntime", (29752,)),),
    16: (("vllm-project/vllm", (49716,)),),
    17: (("vllm-project/vllm", (51091, 50702)),),
    18: (
        ("vllm-project/vllm", (48412,)),
        ("ovg-project/kvcached", (435,)),
    ),
    19: (
        ("vllm-project/vllm", (45361,)),
        ("weicj/vLLM-2080Ti-Definitive", (109,)),
    ),
    20: (("lablup/mlxcel", (717,)),),
    21: (("InfiniTensor/InfiniLM", (553,)),),
    22: (("vllm-project/vllm", (56198,)),),
    23: (("vllm-project/vllm", (48842,)),),
    24: (("vllm-project/vllm", (40388,)),),
    25: (("ggml-org/llama.cpp", (7492,)),),
    27: (("vllm-project/vllm", (49010,)),),
    28: (
        ("flashinfer-ai/flashinfer", (1968,)),
        ("vllm-project/vllm", (41834,)),
    ),
    30: (
        ("sgl-project/sglang", (21987,)),
        ("spiritbuun/buun-llama-cpp", (116,)),
        ("facebookresearch/xformers", (968,)),
    ),
    31: (("microsoft/onnxruntime", (15002, 14942, 32081, 29221)),),
    32: (
        ("microsoft/onnxruntime", (26609, 32673)),
        ("paninski-lab/lightning-pose", (483,)),
    ),
    34: (
        ("vllm-project/vllm", (50427,)),
        ("pytorch/FBGEMM", (5095,)),
        ("fla-org/flash-linear-attention", (1080,)),
        ("ROCm/aiter", (2768,)),
        ("microsoft/onnxruntime", (28385,)),
    ),
    36: (
        ("Dao-AILab/flash-attention", (1745, 2374)),
        ("vllm-project/vllm", (936, 47305)),
    ),
    37: (
        ("huggingface/transformers", (46765,)),
        ("ggml-org/llama.cpp", (3523,)),
    ),
    38: (("flashinfer-ai/flashinfer", (3057,)),),
    39: (
        ("flashinfer-ai/flashinfer", (5031, 3448)),
        ("openvinotoolkit/openvino", (34105,)),
        ("ml-explore/mlx-examples", (1182,)),
    ),
    41: (("vllm-project/vllm", (48905,)),),
    42: (
        ("flashinfer-ai/flashinfer", (996, 4316, 3563, 2684)),
        ("mlc-ai/mlc-llm", (2543,)),
        ("vllm-project/vllm", (40792,)),
    ),
    43: (
        ("microsoft/onnxruntime", (19874, 29261)),
        ("microsoft/onnxruntime-genai", (482, 237, 383)),
        ("Dao-AILab/flash-attention", (1195,)),
        ("onnxruntime/onnxruntime-qnn", (659,)),
    ),
    44: (
        ("local-inference-lab/b12x", (119,)),
        ("kekzl/imp", (1345, 1344)),
        ("ROCm/rocm-libraries", (12227,)),
    ),
    45: (("vllm-project/vllm", (42580,)),),
    46: (
        ("vllm-project/vllm", (4381,)),
        ("microsoft/onnxruntime", (21523,)),
        ("NVIDIA/TensorRT-LLM", (2699,)),
    ),
    48: (("microsoft/onnxruntime-genai", (2187,)),),
    49: (("microsoft/onnxruntime", (31726, 27321, 28318, 20279)),),
    50: (("ROCm/hip-ep", (753, 989)),),
    51: (("microsoft/onnxruntime", (22306,)),),
    52: (
        ("vllm-project/vllm", (26431, 33480)),
        ("flashinfer-ai/flashinfer", (5164,)),
    ),
    53: (
        ("flashinfer-ai/flashinfer", (452,)),
        ("microsoft/onnxruntime", (14710, 24192)),
        ("microsoft/onnxruntime-genai", (730,)),
        ("bitsandbytes-foundation/bitsandbytes", (1952,)),
        ("NVIDIA/cuvs", (1851,)),
    ),
    55: (
        ("vllm-project/vllm", (53334, 55532)),
        ("microsoft/onnxruntime", (32515,)),
        ("ggml-org/llama.cpp", (10011,)),
    ),
    56: (("NVIDIA/TensorRT-LLM", (1303,)),),
    58: (("microsoft/onnxruntime-genai", (1639,)),),
    59: (("ggml-org/llama.cpp", (28455, 28524)),),
    60: (("InternLM/lmdeploy", (3949, 2786)),),
    61: (("microsoft/onnxruntime", (28031,)),),
    62: (
        ("microsoft/onnxruntime", (28376,)),
        ("flashinfer-ai/flashinfer", (1968,)),
    ),
    63: (("microsoft/onnxruntime", (27321, 28031)),),
}
