"""Models and calls of transformers that stof cannot serve: refused by what their layers do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stof import masks
from stof.errors import ArgumentError, MaskError, ShapeError, StofError, UnsupportedError
from tests.integrations import models

hf = pytest.importorskip("stof.integrations.transformers")
import transformers  # noqa: E402

from stof.integrations.transformers.layer_code import calls_interface  # noqa: E402

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64,
}  # fmt: skip
_SEQ2SEQ = {
    "vocab_size": 61, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
}  # fmt: skip
OWN: dict[str, Callable[[], Any]] = {
    "BigBird": lambda: transformers.BigBirdConfig(**SIZES, block_size=4, num_random_blocks=1),
    "BigBirdPegasusEncoder": lambda: transformers.BigBirdPegasusConfig(**_SEQ2SEQ, block_size=4),
    "DebertaV2": lambda: transformers.DebertaV2Config(**SIZES),
    "Longformer": lambda: transformers.LongformerConfig(**SIZES, attention_window=4),
    "MPNet": lambda: transformers.MPNetConfig(**SIZES),
    "Bloom": lambda: transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4),
}


@pytest.mark.parametrize("name", OWN)
def test_models_with_attention_code_of_their_own(name: str) -> None:
    """Also an encoder whose decoder could be served."""
    with pytest.raises(UnsupportedError, match=rf"(?s){name}.*attn_implementation=None.*Attention"):
        transformers.AutoModel.from_config(OWN[name](), attn_implementation="stof")
    model = transformers.AutoModel.from_config(OWN[name]()).eval()
    before = [part.config._attn_implementation for part in model.modules() if hasattr(part, "config")]
    for refused in (hf.enable, lambda m: m.set_attn_implementation("stof")):
        with pytest.raises(UnsupportedError, match=name):
            refused(model)
    assert [part.config._attn_implementation for part in model.modules() if hasattr(part, "config")] == before
    with pytest.raises(StofError):
        hf.sparsify(model, masks.sliding_window(3))
    if hasattr(model, "decoder"):
        hf.enable(model.decoder)


def test_from_pretrained_and_reloaded_models(tmp_path: Any) -> None:
    transformers.AutoModel.from_config(OWN["DebertaV2"]()).save_pretrained(tmp_path / "refused")
    with pytest.raises(UnsupportedError, match="DebertaV2"):
        transformers.AutoModel.from_pretrained(tmp_path / "refused", attn_implementation="stof")
    models.bert().save_pretrained(tmp_path / "served")
    served = transformers.AutoModel.from_pretrained(tmp_path / "served", attn_implementation="stof")
    assert served.config._attn_implementation == "stof"


def test_models_without_attention() -> None:
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1}
    with pytest.raises(UnsupportedError, match="FNetModel"):
        hf.enable(transformers.FNetModel(transformers.FNetConfig(**sizes, intermediate_size=48)))


def test_a_class_is_told_by_its_methods_and_those_it_inherits() -> None:
    layer = transformers.models.bert.modeling_bert.BertSelfAttention
    assert calls_interface(layer)
    assert calls_interface(type("Attention", (layer,), {"forward": lambda self, x: x}))
    assert not calls_interface(transformers.models.bert.modeling_bert.BertModel)
    assert not calls_interface(nn.MultiheadAttention)


def test_a_choice_of_keys_by_the_layer_is_not_left_out() -> None:
    """MiniMax-M3's sparse layers; its dense ones hand None."""
    config = transformers.MiniMaxM3VLTextConfig
    small: dict[str, Any] = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1,
        "max_position_embeddings": 64, "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4,
        "index_topk_blocks": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    ids = torch.randint(3, 60, (1, 24))
    for kinds in (["full_attention", "full_attention"], ["full_attention", "minimax_m3_sparse"]):
        torch.manual_seed(0)
        model = transformers.MiniMaxM3VLTextModel(config(**small, layer_types=kinds)).eval()
        with torch.no_grad():
            expected = model(ids).last_hidden_state
            hf.enable(model)
            if "minimax_m3_sparse" in kinds:
                with pytest.raises(UnsupportedError, match="block_indices"):
                    model(ids)
            else:
                torch.testing.assert_close(model(ids).last_hidden_state, expected, atol=1e-4, rtol=1e-4)


def _minimax() -> Any:
    return transformers.MiniMaxM3VLTextModel(
        transformers.MiniMaxM3VLTextConfig(
            **SIZES | {"num_hidden_layers": 2}, num_key_value_heads=2, head_dim=8, num_local_experts=2,
            num_experts_per_tok=1, index_n_heads=2, index_head_dim=8, index_block_size=4, index_topk_blocks=2,
            layer_types=["full_attention", "minimax_m3_sparse"], pad_token_id=0, bos_token_id=None, eos_token_id=None,
        )
    ).eval()  # fmt: skip


def _put_in(model: Any) -> None:
    layer = model.layers[1].self_attn
    model.layers[1].self_attn = model.layers[0].self_attn
    hf.enable(model)
    model.layers[1].self_attn = layer


@pytest.mark.parametrize(
    "choose",
    [
        lambda model: model.set_attn_implementation({"": "stof"}),
        lambda model: setattr(model.config, "_attn_implementation", "stof"),
        _put_in,
    ],
    ids=["dictionary", "assigned", "put in"],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_choice_of_keys_is_refused_however_stof_was_set(choose: Callable[[Any], None], compiled: bool) -> None:
    torch.compiler.reset()
    model = _minimax()
    choose(model)
    if compiled:
        model.layers[1].self_attn.compile(backend="eager")
    with torch.no_grad(), pytest.raises(UnsupportedError, match="hands block_indices"):
        model(torch.randint(3, 60, (1, 24)))


_DSA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "n_routed_experts": 2, "num_experts_per_tok": 1, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4,
}  # fmt: skip
_VISION = {key: SIZES[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
_T5GEMMA2 = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
# Models whose attention calls the interface, or a part of them, and whose code computes with masks.
COMPUTING: dict[str, Callable[[], Any]] = {
    "GIT": lambda: transformers.GitConfig(**SIZES, vision_config={"image_size": 28, "patch_size": 14, **_VISION}),
    "T5Gemma 2": lambda: transformers.T5Gemma2Config(
        encoder={"text_config": _T5GEMMA2, "vision_config": {"image_size": 28, "patch_size": 14, **_VISION}},
        decoder=_T5GEMMA2,
    ),
    "Doge": lambda: transformers.DogeConfig(**SIZES, num_key_value_heads=2),
    "DeepSeek-V3.2": lambda: transformers.DeepseekV32Config(**SIZES, **_DSA),
}


@pytest.mark.parametrize("name", COMPUTING)
@pytest.mark.parametrize("masked", [False, True])
def test_models_that_compute_with_their_masks(name: str, masked: bool) -> None:
    """Their first call is refused; nothing is computed without the mask."""
    model = hf.enable(transformers.AutoModel.from_config(COMPUTING[name]()).eval())
    ids = torch.randint(3, 60, (2, 8))
    call = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    call |= {"attention_mask": torch.ones_like(ids)} if masked else {}
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"(?s)not a tensor.*computes with its masks.*\"sdpa\""):
        model(**call)


def test_a_refused_dictionary_of_implementations_leaves_the_model_as_it_was() -> None:
    model = transformers.AutoModel.from_config(OWN["BigBirdPegasusEncoder"]())
    before = [part.config._attn_implementation for part in model.modules() if hasattr(part, "config")]
    with pytest.raises(UnsupportedError, match="BigBirdPegasusEncoder"):
        model.set_attn_implementation({"": "stof"})
    assert [part.config._attn_implementation for part in model.modules() if hasattr(part, "config")] == before


@pytest.mark.parametrize(
    "build", [models.gpt2, models.bert, models.t5, lambda: _opt()], ids=["gpt2", "bert", "t5", "opt"]
)
def test_attention_weights_are_refused(build: Callable[[], Any], tmp_path: Any) -> None:
    """Some models do not tell their layers that weights are asked for."""
    model, ids = build(), torch.randint(3, 60, (1, 8))
    call = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="stof").eval()
    for served in (hf.enable(model), loaded):
        with torch.no_grad(), pytest.raises(UnsupportedError, match="output_attentions=True"):
            served(**call, output_attentions=True)
        with torch.no_grad():
            served(**call)
    with torch.no_grad():
        assert hf.disable(model)(**call, output_attentions=False) is not None
        model.set_attn_implementation("eager")
        assert model(**call, output_attentions=True)[-1] is not None
    asking = type(model)(type(model.config)(**model.config.to_dict() | {"output_attentions": True}))
    with torch.no_grad(), pytest.raises(UnsupportedError, match="output_attentions=True"):
        hf.enable(asking.eval())(**call)


def _opt() -> Any:
    config = transformers.OPTConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=1, ffn_dim=48, num_attention_heads=4, word_embed_proj_dim=32,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config).eval()


class _Choosy(transformers.models.llama.modeling_llama.LlamaAttention):
    """A layer that hands on something nobody has heard of."""

    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
        function = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        states = self.q_proj(hidden_states).unflatten(-1, (4, -1)).transpose(1, 2)
        out = function(self, states, states, states, None, scaling=1.0, best_keys=self.best)[0]
        return self.o_proj(out.flatten(2)), None


def test_unknown_arguments_of_layers() -> None:
    model = models.llama().model
    layer = _Choosy(model.config, 0)
    layer.best = None
    model.layers[0].self_attn = layer
    hf.enable(model)
    model(torch.ones(1, 5, dtype=torch.long))
    layer.best = torch.ones(2)
    with pytest.raises(UnsupportedError, match="_Choosy hands best_keys"):
        model(torch.ones(1, 5, dtype=torch.long))


def test_boundaries_of_flash_attention_are_refused() -> None:
    """Where one of the two is given, or a layer is called: nothing else may tell sequences apart."""
    model = hf.enable(models.llama())
    ids, bounds = torch.randint(3, 60, (1, 12)), torch.tensor([0, 5, 12], dtype=torch.int32)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        with pytest.raises(UnsupportedError, match=rf"{name}.*position_ids"):
            model(ids, **{name: bounds})
    both = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    with pytest.raises(UnsupportedError, match=r"cu_seq_lens_q.*position_ids"):
        model.model.forward(ids, **both)
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"cu_seq_lens_q.*position_ids"):
        torch.export.export(model, (ids,), both)
    for changed, error in (
        ({"input_ids": ids.expand(2, -1)}, "one row"),
        ({"cu_seq_lens_k": torch.tensor([0, 6, 12])}, "the same boundaries"),
        ({"past_key_values": transformers.DynamicCache()}, "no cache"),
    ):
        with pytest.raises(UnsupportedError, match=error):
            model(**({"input_ids": ids} | both | changed))
    with pytest.raises(ShapeError, match="one value per token"):
        model(ids, attention_mask=torch.ones(1, 1), **both)
    for wrong in ([0, 5, 11], [0, 7, 5, 12], [1, 5, 12]):
        with pytest.raises((ShapeError, MaskError)):
            model(ids, **dict.fromkeys(both, torch.tensor(wrong)))


def test_paged_caches_are_refused() -> None:
    """Layers of transformers before 5.24 hand them on; newer ones refuse continuous batching with stof themselves."""
    layer, states = models.llama().model.layers[0].self_attn, torch.zeros(1, 4, 4, 8)
    with pytest.raises(UnsupportedError, match="continuous batching"):
        hf.attention_forward(layer, states, states, states, None, cache=object())


@pytest.mark.parametrize("call", [hf.enable, hf.disable, lambda model: hf.sparsify(model, None)])
def test_only_modules(call: Any) -> None:
    with pytest.raises(ArgumentError, match=r"the model is a torch.nn.Module, got str"):
        call("bert")
