"""Models of transformers on split sequences compute and train as in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")

from transformers import RobertaConfig, RobertaModel

import stof.integrations.transformers as stof_hf
from stof import masks
from stof.errors import ArgumentError, RankMismatchError, ShapeError, StofError, UnsupportedError
from tests.distributed.processes import run
from tests.integrations import models

LENGTH = 37
LONG_ROPE = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 16}
# Causal language models with local and global layers, softcapped scores and sinks; and an encoder.
MODELS: dict[str, Callable[[], Any]] = {
    "llama": models.llama,
    "mistral": models.mistral,
    "gemma2": models.gemma2,
    "gpt-oss": models.gpt_oss,
    "bert": models.bert,
}


def make(name: str) -> Any:
    torch.manual_seed(0)
    # transformers' experts have no float64.
    return stof_hf.enable(MODELS[name]().to(torch.float32 if name == "gpt-oss" else torch.float64))


def calls() -> dict[str, dict[str, Tensor]]:
    ids = torch.randint(1, models.VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :9] = -100
    lengths = torch.tensor([[LENGTH], [20]])
    packed = torch.cat([torch.arange(11), torch.arange(26)]).expand(2, -1)
    return {
        "plain": {"input_ids": ids, "labels": labels},
        "padded": {"input_ids": ids, "attention_mask": (torch.arange(LENGTH) < lengths).long()},
        "packed": {"input_ids": ids, "position_ids": packed, "labels": labels},
    }


def trained(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """All tokens' outputs and the loss; a loss of this rank's tokens where the model has none."""
    out = model(**inputs)
    return out[1] if "labels" in inputs else out[0], out.loss if "labels" in inputs else None


def check_model(rank: int, name: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # Losses are computed in float32.
    near: dict[str, Any] = {"atol": 2e-6, "rtol": 1e-5}
    outputs: dict[str, Any] = {"atol": 1e-9, "rtol": 1e-7}
    if name == "gpt-oss":
        near, outputs = {"atol": 1e-4, "rtol": 1e-3}, {"atol": 1e-4, "rtol": 1e-4}
    for kind, inputs in calls().items():
        if kind != "packed" and name not in ("llama", "bert"):
            continue
        if name == "bert":
            inputs.pop("labels", None)
        expected, split = make(name), make(name)
        hidden, loss = trained(expected, inputs)
        with stof_hf.parallelise(split, mesh) as parallel:
            local, split_loss = trained(split, inputs)
            assert parallel.shards is not None
            assert local.shape[1] == len(parallel.shards.positions) < LENGTH
            joined = parallel.join(local)
            seen = inputs.get("attention_mask", torch.ones(2, LENGTH)).bool()
            torch.testing.assert_close(joined[seen], hidden[seen], **outputs, msg=f"{name} {kind}")
            if loss is not None and split_loss is not None:
                torch.testing.assert_close(split_loss, loss, **near)
                loss.backward()
                split_loss.backward()
            else:
                weights = torch.linspace(-1, 1, LENGTH).to(hidden)[:, None] * seen[..., None]
                (hidden * weights).sum().backward()
                (local * parallel.shards.split(weights, 1)).sum().backward()
            parallel.reduce_gradients()
            for (at, one), other in zip(expected.named_parameters(), split.parameters(), strict=True):
                assert (one.grad is None) == (other.grad is None), at
                if one.grad is not None:
                    torch.testing.assert_close(other.grad, one.grad, **near, msg=f"{name} {kind} {at}")
        assert model_takes_all(split, inputs)


def model_takes_all(model: nn.Module, inputs: dict[str, Tensor]) -> bool:
    return trained(model, inputs)[0].shape[1] == LENGTH


def check_sparse(rank: int) -> None:
    """Layers with sparse masks, gradient checkpointing, and outputs from `inputs_embeds`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inputs = calls()["packed"]
    expected, split = make("llama").train(), make("llama").train()
    models.checkpoint_activations(split)
    for model in (expected, split):
        stof_hf.sparsify(model, {1: masks.sliding_window(4) | masks.sink_tokens(1)})
    one = expected(**inputs).loss
    one.backward()
    with stof_hf.parallelise(split, mesh) as parallel:
        for _ in range(2):
            split.zero_grad()
            embeds = split.get_input_embeddings()(inputs["input_ids"])
            other = split(inputs_embeds=embeds, position_ids=inputs["position_ids"], labels=inputs["labels"]).loss
            other.backward()
            parallel.reduce_gradients()
    torch.testing.assert_close(other, one, atol=1e-6, rtol=1e-6)
    for (at, x), y in zip(split.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, atol=2e-6, rtol=1e-5, msg=at)


def check_autocast(rank: int) -> None:
    """Rotary embeddings leave queries and keys in float32, and values are bfloat16."""
    inputs, mesh = calls()["packed"], init_device_mesh("cpu", (dist.get_world_size(),))
    expected, split = make("llama").float(), make("llama").float()
    with torch.autocast("cpu", torch.bfloat16), stof_hf.parallelise(split, mesh) as parallel:
        one, other = expected(**inputs).loss, split(**inputs).loss
        torch.testing.assert_close(other, one, atol=2e-2, rtol=2e-2)
    one.backward()
    other.backward()
    parallel.reduce_gradients()
    for (at, x), y in zip(split.named_parameters(), expected.parameters(), strict=True):
        assert y.grad is not None
        assert (x.grad - y.grad).norm() <= 0.1 * y.grad.norm(), at


def check_refusals(rank: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ids = calls()["plain"]["input_ids"]

    def refuse(kind: type[StofError], message: str, call: Callable[[], object]) -> None:
        with pytest.raises(kind, match=message):
            call()

    model = make("llama")
    plain = models.llama()
    refuse(ArgumentError, "does not run stof's attention; call", lambda: stof_hf.parallelise(plain, mesh))
    t5 = stof_hf.enable(models.t5())
    refuse(UnsupportedError, "cannot be split by position", lambda: stof_hf.parallelise(t5, mesh))
    wrapper = nn.ModuleDict({"base_model": nn.ModuleDict({"model": model})})
    message = r"got ModuleDict; give the one within it, model\.base_model\.model"
    refuse(ArgumentError, message, lambda: stof_hf.parallelise(wrapper, mesh))
    roberta = stof_hf.enable(RobertaModel(RobertaConfig(**models._SMALL | {"pad_token_id": 1})).eval())
    with stof_hf.parallelise(roberta, mesh):
        refuse(UnsupportedError, "other results for position_ids that count from 0", lambda: roberta(ids))
    with stof_hf.parallelise(model, mesh) as parallel:
        model.forward(ids)  # as PEFT's wrappers call it
        refuse(ArgumentError, "not a wrapper of it", parallel.reduce_gradients)
        refuse(ArgumentError, "was not called yet", lambda: parallel.join(ids))
        refuse(UnsupportedError, "no cache", lambda: model(ids, use_cache=True))
        refuse(UnsupportedError, "logits_to_keep", lambda: model(ids, logits_to_keep=1))
        refuse(ShapeError, "one value per token", lambda: model(ids, attention_mask=torch.ones(2, 4)))
        left = torch.arange(LENGTH).expand(2, -1) > 3
        refuse(UnsupportedError, "pad on the right", lambda: model(ids, attention_mask=left))
        refuse(RankMismatchError, "the length is", lambda: model(ids[:, rank:]))
        first = torch.ones_like(ids)
        first[:, 20 + rank :] = 0
        refuse(RankMismatchError, "the mask is", lambda: model(ids, attention_mask=first))
        # As a data loader that gives each rank a batch of its own, which `Trainer` has.
        refuse(RankMismatchError, "the hash of input_ids is", lambda: model(ids + rank))
        refuse(RankMismatchError, "the hash of labels is", lambda: model(ids, labels=ids + rank))
        # As a model that each rank initialises with a seed of its own.
        weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
        restored = weight.detach().clone()
        weight.data[3, 5] += 1e-12 * rank
        refuse(RankMismatchError, "checksum of model.layers.1.mlp.up_proj.weight is", lambda: model(ids))
        weight.data.copy_(restored)
        if rank:
            model.register_parameter("more", nn.Parameter(torch.ones(2)))
        refuse(RankMismatchError, "checksum of more is missing on rank 0", lambda: model(ids))
        if rank:
            del model.more
        refuse(ArgumentError, "shift_labels of split sequences go with labels", lambda: model(ids, shift_labels=ids))
        assert model(ids).logits.shape[1] < LENGTH
    for rope in ({"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "longrope", "factor": 2.0} | LONG_ROPE):
        long = stof_hf.enable(models.llama(rope_parameters=rope | {"rope_theta": 1e4}))
        refuse(UnsupportedError, f"of type '{rope['rope_type']}'", lambda model=long: stof_hf.parallelise(model, mesh))
    bert = make("bert")
    bert.encoder.layer[0].register_module("mix", None)
    forward = bert.encoder.layer[0].output.forward
    bert.encoder.layer[0].output.forward = lambda *x: forward(*x).cumsum(1)
    with stof_hf.parallelise(bert, mesh):
        refuse(UnsupportedError, "cannot run on split sequences: tokens of one", lambda: bert(ids))


def check_labels(rank: int) -> None:
    """Labels that are shifted already, and another label to ignore."""
    ids = calls()["plain"]["input_ids"]
    split, expected = make("llama"), make("llama")
    labels = ids.masked_fill(ids % 3 == 0, 7)
    for options in ({"shift_labels": labels.flip(1)}, {"ignore_index": 7}):
        loss = expected(ids, labels=labels, **options).loss
        with stof_hf.parallelise(split, init_device_mesh("cpu", (dist.get_world_size(),))):
            torch.testing.assert_close(split(ids, labels=labels, **options).loss, loss)


def check_compiled(rank: int) -> None:
    """Compiled code computes the same, in several graphs."""
    inputs = calls()["packed"]
    split, expected = make("gemma2"), make("gemma2")
    loss = expected(**inputs).loss
    loss.backward()
    with stof_hf.parallelise(split, init_device_mesh("cpu", (dist.get_world_size(),))) as parallel:
        compiled = torch.compile(split, backend="eager")(**inputs).loss
        compiled.backward()
        parallel.reduce_gradients()
    torch.compiler.reset()
    torch.testing.assert_close(compiled, loss)
    for (name, x), y in zip(split.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, atol=2e-6, rtol=1e-5, msg=name)


def check_gradients_of_some_ranks(rank: int) -> None:
    model = make("llama")
    first, second, *others = model.parameters()
    (first, second)[rank].grad = torch.full_like((first, second)[rank], 2.0 + rank)
    with stof_hf.parallelise(model, init_device_mesh("cpu", (2,))) as parallel:
        model(calls()["plain"]["input_ids"])
        parallel.reduce_gradients()
    assert (first.grad == 2).all()
    assert (second.grad == 3).all()
    assert all(parameter.grad is None for parameter in others)

    from torch.distributed.fsdp import fully_shard

    mesh, ids = init_device_mesh("cpu", (2,)), calls()["plain"]["input_ids"]
    fully_shard(model, mesh=mesh)
    with stof_hf.parallelise(model, mesh) as parallel:
        model(ids, labels=ids).loss.backward()
        with pytest.raises(ArgumentError, match="give fully_shard another dimension"):
            parallel.reduce_gradients()


def check_all(rank: int) -> None:
    for name in ("llama", "gemma2", "bert"):
        check_model(rank, name)
    check_sparse(rank)
    check_labels(rank)
    check_autocast(rank)
    check_gradients_of_some_ranks(rank)
    check_refusals(rank)


def check_more(rank: int) -> None:
    for name in ("mistral", "gpt-oss"):
        check_model(rank, name)
    check_compiled(rank)


def check_fsdp(rank: int) -> None:
    """Batches on one dimension of the mesh, tokens on the other."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    ids = torch.randint(1, models.VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    expected, split = make("llama"), make("llama")
    one = sum(expected(row[None], labels=row[None]).loss for row in ids) / 2
    one.backward()
    for layer in split.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(split, mesh=mesh["dp"])
    row = ids[mesh.get_local_rank("dp")][None]
    with stof_hf.parallelise(split, mesh["sp"]) as parallel:
        split(row, labels=row).loss.backward()
        parallel.reduce_gradients()
    for (name, x), y in zip(split.named_parameters(), expected.parameters(), strict=True):
        assert isinstance(x.grad, DTensor), name
        torch.testing.assert_close(x.grad.full_tensor(), y.grad, atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.slow
def test_with_fsdp2_on_the_other_dimension() -> None:
    run(check_fsdp, 4)


def test_models_compute_as_in_one_process() -> None:
    run(check_all, 2)


def check_trainer(rank: int, folder: str) -> None:
    """`Trainer` gives each rank a batch of its own: it trains data-parallel, and is refused for split sequences."""
    from transformers import Trainer, TrainingArguments

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    rows = torch.randint(1, models.VOCABULARY, (8, 16), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    arguments = TrainingArguments(folder, max_steps=2, per_device_train_batch_size=2, **options)
    model = stof_hf.enable(models.llama())
    before = model.lm_head.weight.detach().clone()
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train()
    assert not torch.equal(model.lm_head.weight, before)
    with (
        stof_hf.parallelise(model, init_device_mesh("cpu", (2,))),
        pytest.raises(RankMismatchError, match="the hash of input_ids is"),
    ):
        trainer.train()


@pytest.mark.slow
def test_trainer_splits_the_batch_alone(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    run(check_trainer, 2, str(tmp_path))


@pytest.mark.slow
def test_more_models_compute_as_in_one_process() -> None:
    run(check_more, 2)


def check_one_rank(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1,))
    ids = torch.arange(1, 21)[None]
    dropping = make("llama").train()
    for layer in dropping.modules():
        if hasattr(layer, "attention_dropout"):
            layer.attention_dropout = 0.5
    with stof_hf.parallelise(dropping, mesh), pytest.raises(UnsupportedError, match="no dropout"):
        dropping(ids)

    model, plain, limit = make("llama").eval(), make("llama").eval(), [3]
    changing = masks.from_function(lambda b, h, q, kv: q - kv < limit[0])
    with torch.no_grad(), stof_hf.sparsify(model, changing), stof_hf.parallelise(model, mesh):
        for limit[0] in (3, 7):
            with stof_hf.sparsify(plain, masks.sliding_window(limit[0] - 1)):
                torch.testing.assert_close(model(ids).logits, plain(ids).logits)


def test_dropout_is_refused_and_masks_have_the_values_of_the_call() -> None:
    run(check_one_rank, 1)
