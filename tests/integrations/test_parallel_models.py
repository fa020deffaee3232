"""Tensor-parallel layers and pipeline stages compute and train as one process does, under every mask; two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

pytest.importorskip("transformers")

import stof
import stof.integrations.transformers as stof_hf
from stof import masks
from stof.errors import ShapeError, UnsupportedError
from stof.masks import Mask
from tests.distributed.processes import run
from tests.integrations import models

# Divisible among ranks, as transformers wants it of the output layer.
VOCABULARY = 64
MASKS: dict[str, Mask | None] = {
    "none": None,
    "window": masks.sliding_window(4),
    "by head": masks.per_head([masks.sliding_window(n) for n in (19, 1, 7, 0)]),
    "function": masks.from_function(lambda b, h, q, k: (q - k) % (h + 2) <= b),
    "tensor": masks.from_dense(torch.rand(4, 20, 20, generator=torch.Generator().manual_seed(3)) < 0.5),
}


def make(name: str = "llama") -> Any:
    torch.manual_seed(0)
    if name == "llama":
        return stof_hf.enable(models.llama(vocab_size=VOCABULARY).double())
    from transformers import AutoConfig, AutoModelForCausalLM

    changes = {"vocab_size": VOCABULARY, "sliding_window": 6, "tie_word_embeddings": False}
    config = AutoConfig.for_model(name, **models._DECODER | changes)
    model = AutoModelForCausalLM.from_config(config).double()
    for at, parameter in model.named_parameters():
        if at.endswith("sinks"):
            nn.init.normal_(parameter)
    return stof_hf.enable(model.eval())


def tokens() -> Tensor:
    return torch.randint(1, VOCABULARY, (4, 20), generator=torch.Generator().manual_seed(1))


def split_by_transformers(model: Any, mesh: DeviceMesh) -> None:
    """What `from_pretrained(..., tp_plan="auto")` does; that itself needs accelerate."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plans = ()
    if hasattr(model, "_resolve_parallel_plans"):  # transformers 5.24 takes the plan as an argument
        plans = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))[:1]
    apply_tensor_parallelism(model, mesh, *plans)


def split_by_torch(model: Any, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)


def full(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.full_tensor() if isinstance(x, DTensor) else x


def check_equal(model: Any, expected: Any, what: str) -> None:
    """The loss and gradients of two models, and the logits of a short generation."""
    ids = tokens()
    # Losses of transformers are computed in float32.
    weights = torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64)
    loss, one = ((each(ids).logits * weights).sin().mean() for each in (model, expected))
    torch.testing.assert_close(loss, one, msg=f"{what}: {loss} {one}")
    loss.backward()
    one.backward()
    for (name, x), y in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(full(x.grad), full(y.grad), atol=1e-9, rtol=1e-7, msg=f"{what} {name}")
    for each in (model, expected):
        each.zero_grad()
    if what.endswith("tensor"):  # which has one length
        return
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids[:, :17], **options), expected.generate(ids[:, :17], **options)), what


def check_tensor_parallel(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for split in (split_by_transformers, split_by_torch):
        model, expected = make(), make()
        split(model, mesh)
        assert model.model.layers[0].self_attn.q_proj.weight.to_local().shape == (16, 32)
        for name, mask in MASKS.items():
            for each in (model, expected):
                stof_hf.sparsify(each, mask)
            check_equal(model, expected, f"{split.__name__} {name}")
    stof_hf.sparsify(model, masks.per_head([masks.causal()] * 2))
    with pytest.raises(ShapeError, match="heads of 2, the inputs have 4"):
        model(tokens())

    sinks, expected = make("granite_swa"), make("granite_swa")
    split_by_transformers(sinks, mesh)
    assert isinstance(sinks.model.layers[0].self_attn.sinks, DTensor)
    check_equal(sinks, expected, "sinks")
    for layer in sinks.model.layers:  # of all heads, where each rank has some
        sink = layer.self_attn.sinks.full_tensor().detach()
        layer.self_attn.sinks = nn.Parameter(distribute_tensor(sink, mesh, [Replicate()]))
    with pytest.raises(ShapeError, match="one logit per query head"):
        sinks(tokens())


class Plain(nn.Module):
    """A layer that has some of its heads, without saying which."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.config = make().config
        self.weight = nn.Parameter(torch.zeros(heads))


def check_unknown_heads(rank: int) -> None:
    from stof.integrations.transformers.tensor_parallel import mask_of_rank

    mesh = init_device_mesh("cpu", (2,))
    function = MASKS["function"]
    assert function is not None
    assert mask_of_rank(Plain(4), function, 4) is function
    with pytest.raises(UnsupportedError, match=r"Plain has 2 heads on this rank and 4 in its configuration"):
        mask_of_rank(Plain(2), function, 2)
    layer = Plain(4)
    layer.weight = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    with pytest.raises(UnsupportedError, match="which ones is not known"):
        mask_of_rank(layer, function, 1)
    alike = masks.from_function(lambda b, h, q, k: q - k < 5)
    assert mask_of_rank(layer, alike, 1) is alike


def check_pipeline(rank: int) -> None:
    """Two stages of one layer each, trained by microbatches, as PyTorch's tutorial has it."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    class Stage(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model, self.layer = model, model.model.layers[rank]

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.model.model.embed_tokens(x) if rank == 0 else x
            positions = torch.arange(hidden.shape[1])[None]
            rotary = self.model.model.rotary_emb(hidden, positions)
            mask = stof_hf.make_mask(hidden.shape[0], hidden.shape[1], hidden.shape[1])
            hidden = self.layer(hidden, attention_mask=mask, position_embeddings=rotary)
            return hidden if rank == 0 else self.model.lm_head(self.model.model.norm(hidden))

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    model, expected, ids = make(), make(), tokens()
    for each in (model, expected):
        stof_hf.sparsify(each, MASKS["by head"])
    one = expected(ids).logits
    loss_of(one, ids).backward()
    schedule = ScheduleGPipe(PipelineStage(Stage(model), rank, 2, torch.device("cpu")), 2, loss_fn=loss_of)
    losses: list[Tensor] = []
    out = schedule.step(ids) if rank == 0 else schedule.step(target=ids, losses=losses)
    if rank == 1:
        torch.testing.assert_close(out, one)
        torch.testing.assert_close(sum(losses) / 2, loss_of(one, ids))
    gradients = dict(expected.named_parameters())
    of_rank = [(name, x) for name, x in model.named_parameters() if x.grad is not None]
    assert any(f"layers.{rank}" in name for name, _ in of_rank)
    for name, x in of_rank:
        torch.testing.assert_close(x.grad, gradients[name].grad, msg=name)


def check_optimize(rank: int, mode: str) -> None:
    """`stof.optimize` of a tensor-parallel or FSDP2 model, for inference and training."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    ids = tokens()
    for training in (False, True):
        torch.compiler.reset()
        model, expected = (make().float().train(training) for _ in range(2))
        if mode == "FSDP2":
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            split_by_transformers(model, mesh)
        stof_hf.sparsify(expected, MASKS["by head"])
        compiled = stof.optimize(model, mask=MASKS["by head"])
        with torch.set_grad_enabled(training):
            loss, one = (each(ids, labels=ids).loss for each in (compiled, expected))
        torch.testing.assert_close(loss, one, atol=1e-4, rtol=1e-4)
        if training:
            loss.backward()
            one.backward()
            for (name, x), y in zip(model.named_parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(full(x.grad), full(y.grad), atol=1e-4, rtol=1e-3, msg=name)


def check_quickly(rank: int) -> None:
    check_tensor_parallel(rank)
    check_unknown_heads(rank)
    check_pipeline(rank)


@pytest.mark.slow
def test_tensor_parallel_layers_and_pipeline_stages_compute_as_one_process() -> None:
    run(check_quickly, 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tensor parallel", "FSDP2"])
def test_optimized_models_compute_as_one_process(mode: str) -> None:
    run(check_optimize, 2, mode)
