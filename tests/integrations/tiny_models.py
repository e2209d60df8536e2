"""Models of the package transformers with random parameters, as small as they come, by family."""

from __future__ import annotations

from typing import NamedTuple

import torch

VOCABULARY, LENGTH = 50, 9
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
DECODER = SIZES | dict(num_key_value_heads=2, head_dim=8)
INDEXED = SIZES | dict(
    num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
    v_head_dim=8, index_n_heads=4, index_head_dim=16, index_topk=4, initializer_range=0.3,
    mlp_layer_types=["dense", "dense"],
)  # fmt: skip
SEQ2SEQ = dict(
    vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, pad_token_id=0,
    encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=40,
    decoder_start_token_id=1, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
IMAGE = dict(
    hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    image_size=16, patch_size=8,
)  # fmt: skip
DROPOUTS = {
    "dropout", "attention_dropout", "activation_dropout", "hidden_dropout_prob", "dropout_rate",
    "attention_probs_dropout_prob", "embd_pdrop", "attn_pdrop", "resid_pdrop", "hidden_dropout",
    "feat_proj_dropout",
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention"]


class Family(NamedTuple):
    """How to build one of a family, and what is fed to it."""

    config: str
    model: str
    options: dict
    inputs: str  # "tokens", "both" (of an encoder and a decoder) and so on: inputs()
    kind: str = "encoder"  # "decoder" generates, "seq2seq" too


def _text(text: dict, vision: dict) -> dict:
    return dict(text_config=text, vision_config=vision, projection_dim=16)


FAMILIES = {
    "bert": Family("BertConfig", "BertForMaskedLM", SIZES, "tokens"),
    "modernbert": Family(
        "ModernBertConfig", "ModernBertForMaskedLM",
        SIZES | dict(
            local_attention=4, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2
        ), "tokens"),
    "gpt2": Family(
        "GPT2Config", "GPT2LMHeadModel",
        dict(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, pad_token_id=0,
             bos_token_id=1, eos_token_id=2), "tokens", "decoder"),
    "llama": Family("LlamaConfig", "LlamaForCausalLM", DECODER, "tokens", "decoder"),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM", DECODER, "tokens", "decoder"),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", DECODER, "tokens", "decoder"),
    "phi3": Family("Phi3Config", "Phi3ForCausalLM", DECODER, "tokens", "decoder"),
    "mistral": Family(
        "MistralConfig", "MistralForCausalLM", DECODER | dict(sliding_window=4), "tokens",
        "decoder"),
    "gemma3": Family(
        "Gemma3TextConfig", "Gemma3ForCausalLM",
        DECODER | dict(sliding_window=4, layer_types=MIXED, query_pre_attn_scalar=8), "tokens",
        "decoder"),
    "gemma2": Family(
        "Gemma2Config", "Gemma2ForCausalLM",
        # Scores near the cap: by default they are tiny, and the cap is 50.
        DECODER | dict(sliding_window=4, layer_types=MIXED, query_pre_attn_scalar=1,
                       initializer_range=0.1, attn_logit_softcapping=0.5), "tokens", "decoder"),
    "gemma4": Family(
        "Gemma4TextConfig", "Gemma4ForCausalLM",
        # Layers that share the keys of others compute the last token only in generate().
        DECODER | dict(sliding_window=4, layer_types=2 * MIXED, num_hidden_layers=4,
                       num_kv_shared_layers=2, global_head_dim=8, hidden_size_per_layer_input=8,
                       vocab_size_per_layer_input=VOCABULARY), "tokens", "decoder"),
    "paligemma": Family(
        # Without a cache its text model asks a mask that was made before for its shape.
        "PaliGemmaConfig", "PaliGemmaForConditionalGeneration",
        _text(DECODER | dict(model_type="gemma", use_cache=False),
              IMAGE | dict(model_type="siglip_vision_model", vision_use_head=False))
        | dict(image_token_index=VOCABULARY - 1, hidden_size=32), "tokens", "decoder"),
    "gpt_oss": Family(
        "GptOssConfig", "GptOssForCausalLM",
        DECODER | dict(sliding_window=4, layer_types=MIXED, num_local_experts=2,
                       num_experts_per_tok=2), "tokens", "decoder"),
    "llama4": Family(
        "Llama4TextConfig", "Llama4ForCausalLM",
        DECODER | dict(attention_chunk_size=4, intermediate_size_mlp=40, num_local_experts=2,
                       layer_types=["chunked_attention", "full_attention"]), "tokens", "decoder"),
    # Packed or not, it makes a mask of its own from the tensor.
    "doge": Family(
        "DogeConfig", "DogeForCausalLM", SIZES | dict(num_key_value_heads=2), "tokens", "decoder"),
    # The next two call an implementation in some layers, and add the mask to scores in others.
    "git": Family(
        "GitConfig", "GitForCausalLM",
        SIZES | dict(vision_config=IMAGE, initializer_range=0.3), "tokens", "decoder"),
    "bigbird_pegasus": Family(
        "BigBirdPegasusConfig", "BigBirdPegasusForConditionalGeneration",
        SEQ2SEQ | dict(max_position_embeddings=64, attention_type="original_full", init_std=0.3),
        "both", "seq2seq"),
    # It appends columns to a tensor, for keys that it appends in some layers.
    "deepseek_v4": Family(
        "DeepseekV4Config", "DeepseekV4ForCausalLM",
        SIZES | dict(
            moe_intermediate_size=40, head_dim=8, q_lora_rank=16, o_groups=2, o_lora_rank=16,
            n_routed_experts=4, num_experts_per_tok=2, sliding_window=4, index_n_heads=2,
            index_head_dim=8, index_topk=2, initializer_range=0.3,
            compress_rates=dict(compressed_sparse_attention=2, heavily_compressed_attention=4),
            layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        ), "tokens"),
    # They name the keys that a query may see.
    "deepseek_v32": Family("DeepseekV32Config", "DeepseekV32ForCausalLM", INDEXED, "tokens",
                           "decoder"),
    "glm_moe_dsa": Family("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", INDEXED, "tokens", "decoder"),
    "minimax_m3": Family(
        "MiniMaxM3VLTextConfig", "MiniMaxM3VLForCausalLM",
        DECODER | dict(
            dense_intermediate_size=40, mlp_layer_types=["dense", "dense"], rotary_dim=8,
            index_n_heads=2, index_head_dim=8, index_block_size=2, index_topk_blocks=2,
            layer_types=["minimax_m3_sparse", "full_attention"], initializer_range=0.3,
        ), "tokens", "decoder"),
    "t5": Family(
        "T5Config", "T5ForConditionalGeneration",
        dict(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4,
             pad_token_id=0, decoder_start_token_id=0, eos_token_id=2), "both", "seq2seq"),
    "bart": Family(
        "BartConfig", "BartForConditionalGeneration", SEQ2SEQ | dict(max_position_embeddings=64),
        "both", "seq2seq"),
    "whisper": Family(
        "WhisperConfig", "WhisperForConditionalGeneration",
        SEQ2SEQ | dict(num_mel_bins=8, max_source_positions=12, max_target_positions=32,
                       suppress_tokens=None, begin_suppress_tokens=None), "sound", "seq2seq"),
    "wav2vec2": Family(
        "Wav2Vec2Config", "Wav2Vec2Model",
        SIZES | dict(conv_dim=(16, 16), conv_kernel=(4, 3), conv_stride=(2, 2),
                     num_feat_extract_layers=2, feat_extract_norm="layer",
                     do_stable_layer_norm=True, num_conv_pos_embeddings=4,
                     num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.0), "wave"),
    # Its convolutions read the rows of the mask.
    "lasr": Family(
        "LasrEncoderConfig", "LasrEncoder",
        dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
             num_mel_bins=16, subsampling_conv_channels=16), "features"),
    # It adds the mask to the bias that its layers share.
    "beit": Family(
        "BeitConfig", "BeitModel",
        IMAGE | dict(use_relative_position_bias=True, out_features=None, initializer_range=0.3,
                     layer_scale_init_value=1.0), "patches"),
    "vit": Family("ViTConfig", "ViTModel", IMAGE, "image"),
    "clip": Family(
        "CLIPConfig", "CLIPModel", _text(SIZES, IMAGE), "pairs"),
    "siglip": Family(
        "SiglipConfig", "SiglipModel", dict(text_config=SIZES, vision_config=IMAGE), "pairs"),
    "detr": Family(
        "DetrConfig", "DetrModel",
        dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
             decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=40, num_queries=5,
             use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
             backbone_config=dict(model_type="resnet", embedding_size=8, hidden_sizes=[8, 16],
                                  depths=[1, 1], layer_type="basic", out_features=["stage2"])),
        "image"),
}  # fmt: skip


def build(name: str, **changes) -> torch.nn.Module:
    """The model of a family, always the same one, with eager attention and without dropout."""
    import transformers

    family = FAMILIES[name]
    options = family.options | changes
    config = getattr(transformers, family.config)(**options)
    parts = [getattr(config, f"{part}_config", None) for part in ("text", "vision")]
    for part in (config, *filter(None, parts)):
        for key in DROPOUTS - options.keys():
            if isinstance(getattr(part, key, None), float):
                setattr(part, key, 0.0)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return getattr(transformers, family.model)(config).eval()


def tokens(*lengths: int, left: bool = False) -> dict[str, torch.Tensor]:
    """Token numbers [B, LENGTH] and their mask: rows that long, padded right or left."""
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (len(lengths), LENGTH), generator=rng)
    position = torch.arange(LENGTH)
    keep = torch.stack([position >= LENGTH - n if left else position < n for n in lengths])
    return {"input_ids": ids * keep, "attention_mask": keep.long()}


def inputs(name: str, dtype: torch.dtype = torch.float32, left: bool = False) -> dict:
    """What a family is fed: two samples, the second one shorter where there are lengths."""
    rng = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(dtype)

    text = tokens(LENGTH, 6, left=left)
    match FAMILIES[name].inputs:
        case "tokens":
            return text
        case "both":
            return text | dict(decoder_input_ids=tokens(LENGTH, LENGTH)["input_ids"][:, :7])
        case "sound":
            ids = tokens(LENGTH, LENGTH)["input_ids"][:, :7]
            return dict(input_features=normal(2, 8, 24), decoder_input_ids=ids)
        case "wave":
            mask = torch.ones(2, 80, dtype=torch.long)
            mask[1, 50:] = 0
            return dict(input_values=normal(2, 80), attention_mask=mask)
        case "features":
            mask = torch.arange(40) < torch.tensor([[40], [24]])
            return dict(input_features=normal(2, 40, 16), attention_mask=mask.long())
        case "patches":
            mask = torch.arange(5) < torch.tensor([[5], [3]])
            return dict(pixel_values=normal(2, 3, 16, 16), attention_mask=mask.long())
        case "image":
            size = 64 if name == "detr" else 16
            return dict(pixel_values=normal(2, 3, size, size))
        case _:
            return dict(input_ids=text["input_ids"], pixel_values=normal(2, 3, 16, 16))
