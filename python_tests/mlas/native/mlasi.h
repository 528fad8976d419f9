// Stands in for ONNX Runtime's mlasi.h, so that the kernels compile alone: the platform object and its one pointer.

#pragma once

#include <cstddef>
#include <cstdint>

#define MLAS_UNREFERENCED_PARAMETER(parameter) ((void)(parameter))

struct MLAS_KV_CACHE_QUANT_DISPATCH;
extern const MLAS_KV_CACHE_QUANT_DISPATCH MlasKvCacheQuantDispatchAvx2;
extern const MLAS_KV_CACHE_QUANT_DISPATCH MlasKvCacheQuantDispatchAvx512;

struct MLAS_PLATFORM {
    const MLAS_KV_CACHE_QUANT_DISPATCH* KvCacheQuantDispatch{nullptr};
};

inline MLAS_PLATFORM&
GetMlasPlatform()
{
    static MLAS_PLATFORM Platform;
    return Platform;
}
