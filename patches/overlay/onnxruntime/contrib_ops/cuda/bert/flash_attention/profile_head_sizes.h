// Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
//
// The head sizes that flash attention is compiled for. Its kernels are most of the build time of the CUDA provider, so
// the decoder profile leaves out sizes that decoders hardly have; cmake/kv_quant_decoder_profile.cmake leaves out their
// sources. Included after static_switch.h, whose HEADDIM_SWITCH it replaces there.

#pragma once

#include <cstddef>

#ifdef KVQ_DECODER_PROFILE

#undef HEADDIM_SWITCH
#define HEADDIM_SWITCH(HEADDIM, ...)                             \
  [&] {                                                          \
    if (HEADDIM <= 32) {                                         \
      constexpr static int kHeadDim = 32;                        \
      return __VA_ARGS__();                                      \
    } else if (HEADDIM <= 64) {                                  \
      constexpr static int kHeadDim = 64;                        \
      return __VA_ARGS__();                                      \
    } else if (HEADDIM <= 96) {                                  \
      constexpr static int kHeadDim = 96;                        \
      return __VA_ARGS__();                                      \
    } else if (HEADDIM <= 128) {                                 \
      constexpr static int kHeadDim = 128;                       \
      return __VA_ARGS__();                                      \
    } else if (HEADDIM > 224 && HEADDIM <= 256) {                \
      constexpr static int kHeadDim = 256;                       \
      return __VA_ARGS__();                                      \
    } else {                                                     \
      ORT_THROW("head size ", HEADDIM, " is not in this build"); \
    }                                                            \
  }()

#endif

namespace onnxruntime {
namespace flash {

constexpr bool IsHeadSizeCompiled(size_t head_size) {
#ifdef KVQ_DECODER_PROFILE
  return head_size <= 128 || head_size > 224;
#else
  return head_size > 0;
#endif
}

}  // namespace flash
}  // namespace onnxruntime
