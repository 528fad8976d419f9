# Copyright (c) the kv-quant patch set authors. Licensed under the MIT License.
#
# Sources of operators that the decoder profile does not register (kvbuild/data/decoder.config): compiled, they would
# be dropped by the linker. Expressions match paths below onnxruntime/. Files that the provider bridge
# (cpu_provider_shared.cc) or a kept operator uses stay, though their operator is gone.

set(KV_QUANT_DECODER_EXCLUDES
  "core/providers/cpu/(fp16|ml|optional|rnn|sequence|signal|text)/"
  "core/providers/cpu/controlflow/scan_8"
  "core/providers/cpu/object_detection/roialign"
  "core/providers/cpu/generator/random"
  "core/providers/cpu/math/(det|hardmax)"
  "core/providers/cpu/nn/(Unpool|batch_norm|conv|conv_transpose|instance_norm|lp_norm|lrn|pool|roi_pool|shrink|tfidfvectorizer)\\.cc"
  "core/providers/cpu/quantization/(conv_integer|qlinearconv)"
  "core/providers/cpu/tensor/(affine_grid|col2im|compress|eye_like|grid_sample|isinf|mean_variance_normalization|onehot|resize|reverse_sequence|space_depth_ops|unique|upsample)\\.cc"
  "contrib_ops/cpu/attnlstm/"
  "contrib_ops/cpu/(cdist|conv_transpose_with_dynamic_pads|crop|crop_and_resize|dynamicslice|expand_dims|fused_conv|grid_sample|image_scaler|inverse|maxpool_with_mask|mean_variance_normalization_exp|murmur_hash3|nchwc_ops|sample|tokenizer|unique|word_conv_embedding)\\.cc"
  "contrib_ops/cpu/math/"
  "contrib_ops/cpu/quantization/(attention_quant|dynamic_quantize_lstm|matmul_bnb4|matmul_integer16|nhwc_max_pool|qembed_layer_norm|qlinear_)"
  "contrib_ops/cpu/sparse/"
  "contrib_ops/cpu/tensor/"
  "contrib_ops/cpu/bert/(bifurcation_detector|decoder_masked_multihead_attention|embed_layer_norm|longformer_attention_base|ngram_repeat_block)"
)

# Removes those sources from the list variable that is named.
function(kv_quant_filter_decoder_sources sources)
  if(KVQ_PROFILE STREQUAL "decoder")
    foreach(expression IN LISTS KV_QUANT_DECODER_EXCLUDES)
      list(FILTER ${sources} EXCLUDE REGEX "/onnxruntime/${expression}")
    endforeach()
    set(${sources} ${${sources}} PARENT_SCOPE)
  endif()
endfunction()
