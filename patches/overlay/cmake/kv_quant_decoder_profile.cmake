# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
#
# Sources of operators that the decoder profile does not register (kvbuild/data/decoder.config): compiled, they would
# be dropped by the linker. Expressions match paths below onnxruntime/. Files that the provider bridge
# (cpu_provider_shared.cc) or a kept operator uses stay, though their operator is gone. Of flash attention, head sizes
# that decoders hardly have are gone as well (profile_head_sizes.h beside its sources).

set(KV_QUANT_DECODER_EXCLUDES
  "core/providers/cpu/(fp16|ml|optional|rnn|sequence|signal|text)/"
  "core/providers/cpu/math/(det|hardmax)"
  "core/providers/cpu/nn/(Unpool|batch_norm|conv|conv_transpose|instance_norm|lp_norm|lrn|pool|roi_pool|shrink|tfidfvectorizer)\\.cc"
  "core/providers/cpu/quantization/(conv_integer|qlinearconv)"
  "core/providers/cpu/tensor/(affine_grid|col2im|compress|eye_like|grid_sample|isinf|mean_variance_normalization|resize|reverse_sequence|space_depth_ops|unique)\\.cc"
  "contrib_ops/cpu/attnlstm/"
  "contrib_ops/cpu/(cdist|conv_transpose_with_dynamic_pads|crop|crop_and_resize|dynamicslice|expand_dims|fused_conv|grid_sample|image_scaler|inverse|maxpool_with_mask|mean_variance_normalization_exp|murmur_hash3|nchwc_ops|sample|tokenizer|unique|word_conv_embedding)\\.cc"
  "contrib_ops/cpu/math/"
  "contrib_ops/cpu/quantization/(attention_quant|dynamic_quantize_lstm|matmul_bnb4|matmul_integer16|nhwc_max_pool|qembed_layer_norm|qlinear_)"
  "contrib_ops/cpu/sparse/"
  "contrib_ops/cpu/tensor/"
  "contrib_ops/cpu/bert/(bifurcation_detector|decoder_masked_multihead_attention|ngram_repeat_block)"

  "core/providers/cuda/(object_detection|rnn)/"
  "core/providers/cuda/controlflow/scan"
  "core/providers/cuda/cuda_nhwc_kernels"
  "core/providers/cuda/generator/random"
  "core/providers/cuda/nn/(batch_norm|conv|conv_transpose|instance_norm|instance_norm_impl|lrn|max_pool_with_index|pool|shrink|shrink_impl)\\.cc?u?$"
  "core/providers/cuda/tensor/(compress|eye_like|grid_sample|onehot|resize|reverse_sequence|sequence_op|space_depth_ops|upsample)"
  "contrib_ops/cuda/(aten_ops|collective|diffusion|moe|sparse|tensor|transformers)/"
  "contrib_ops/cuda/(conv_transpose_with_dynamic_pads|fused_conv|inverse)\\.cc"
  "contrib_ops/cuda/bert/(attention|decoder_attention|decoder_attention_impl|decoder_masked_multihead_attention|decoder_masked_self_attention)\\.c[cu]$"
  "contrib_ops/cuda/bert/(embed_layer_norm|gemma_rotary_emb|longformer|ngram_repeat_block|packed_(multihead_)?attention\\.cc|relative_attn_bias|remove_padding|restore_padding)"
  "contrib_ops/cuda/bert/flash_attention/flash_fwd(_split)?_hdim(160|192|224)_"
  "contrib_ops/cuda/math/(bias_dropout|bias_softmax|bitmask_dropout|complex_mul|fft_ops|gemm_float8|isfinite)"
  "contrib_ops/cuda/quantization/(attention_quantization|dequantize_blockwise_bnb4|matmul_bnb4|moe_quantization|quantize_dequantize_linear)"
  "contrib_ops/cuda/quantization/qordered_ops/"
)

# The provider bridge offers these to a CUDA provider; a CPU build has no bridge.
if(NOT onnxruntime_USE_CUDA)
  list(APPEND KV_QUANT_DECODER_EXCLUDES
    "core/providers/cpu/controlflow/scan_8"
    "core/providers/cpu/generator/random"
    "core/providers/cpu/object_detection/roialign"
    "core/providers/cpu/tensor/(onehot|upsample)\\.cc"
    "contrib_ops/cpu/bert/(embed_layer_norm|longformer_attention_base)"
  )
endif()

# Removes those sources from the list variable that is named.
function(kv_quant_filter_decoder_sources sources)
  if(KVQ_PROFILE STREQUAL "decoder")
    foreach(expression IN LISTS KV_QUANT_DECODER_EXCLUDES)
      list(FILTER ${sources} EXCLUDE REGEX "/onnxruntime/${expression}")
    endforeach()
    set_source_files_properties("${ONNXRUNTIME_ROOT}/contrib_ops/cuda/bert/flash_attention/flash_api.cc"
      PROPERTIES COMPILE_DEFINITIONS KVQ_DECODER_PROFILE)
    set(${sources} ${${sources}} PARENT_SCOPE)
  endif()
endfunction()
