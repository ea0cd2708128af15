"""Train a small GPT on the sources of Python's standard library, through flash3 and through torch's attention side by side.

    python examples/train_gpt.py --json training.json --picture training.png    # on a Hopper GPU
    python examples/train_gpt.py --device cpu --steps 20                                   # a tiny model, in seconds

Documents (files) are packed one after another without padding: attention gets one row of tokens and where each document starts. All runs
begin with the same weights, see the same batches and take turns, ten steps each, so that the clock treats them alike.
"""

from __future__ import annotations

import functools
import itertools
import json
import platform
import random
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import flash3
from flash3 import Mask

END = b"\0"  # ends a document; no source file holds it
VOCABULARY = 256  # a token is a byte
TURN = 10  # steps of one run before it is another one's turn; speed is counted from the second turn on
RATE, WARM_UP = 5e-4, 1 / 3  # the largest learning rate, and the share of the steps after which it is reached
SMOOTHING = 20  # steps in a moving average
LIMIT = 0.02  # the smoothed losses of two runs must not differ by more


@dataclass(frozen=True)
class Size:
    """A model, and how much text it sees in a step."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int  # longest document; longer ones are cut
    tokens: int  # in a batch

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim


SIZES = {
    "tiny": Size(layers=2, heads=4, kv_heads=2, head_dim=16, context=512, tokens=1024),
    "small": Size(layers=8, heads=6, kv_heads=2, head_dim=128, context=8192, tokens=32768),
}


# ---------------------------------------------------------------- text: documents, packed


class Batch(NamedTuple):
    """Documents one after another. Each byte is to predict the next one of its document."""

    inputs: Tensor  # (tokens,)
    targets: Tensor  # (tokens,)
    positions: Tensor  # (tokens,), from 0 in each document
    cu_seqlens: Tensor  # int32 (documents + 1,): where each document starts, and the end of the last one
    lengths: tuple[int, ...]  # of the documents
    bound: int  # on the lengths; the context, which is the same for every batch: a number that changed would compile again

    @staticmethod
    def of(pieces: list[bytes], context: int, device: torch.device) -> Batch:
        lengths = tuple(len(piece) - 1 for piece in pieces)
        inputs, targets = (bytearray().join(piece[cut] for piece in pieces) for cut in (slice(-1), slice(1, None)))
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)  # no batch is like another one here: compile for any number of documents at once
        return Batch(
            inputs=torch.frombuffer(inputs, dtype=torch.uint8).to(device, torch.int64),
            targets=torch.frombuffer(targets, dtype=torch.uint8).to(device, torch.int64),
            positions=torch.cat([torch.arange(n) for n in lengths]).to(device),
            cu_seqlens=cu_seqlens,
            lengths=lengths,
            bound=context,
        )


def documents(seed: int) -> Iterator[bytes]:
    """The standard library's source files, round after round, each round in an order of its own."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(f for f in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(f.relative_to(root).parts))
    order = random.Random(seed)
    while True:
        order.shuffle(files)
        for file in files:
            yield file.read_bytes().replace(END, b"") + END


def batches(size: Size, steps: int, device: torch.device, seed: int = 0) -> list[Batch]:
    """Full batches. A document that is longer than the context or the room left goes on as another one."""
    source, rest, found = documents(seed), b"", []
    for _ in range(steps):
        pieces, room = [], size.tokens
        while room:
            while len(rest) < 2:
                rest = next(source)
            piece = rest[: min(room, size.context) + 1]
            rest = rest[len(piece) - 1 :]
            pieces.append(piece)
            room -= len(piece) - 1
        found.append(Batch.of(pieces, size.context, device))
    return found


# ---------------------------------------------------------------- attention: batch → function of q, k, v

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q (tokens, heads, head_dim), k and v (tokens, kv_heads, head_dim) → (tokens, heads, head_dim)."""


def through_flash3(batch: Batch) -> Attend:
    """Packed documents are what attention_varlen takes. Grouped queries need no repeated keys."""
    return functools.partial(
        flash3.attention_varlen,
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_k=batch.cu_seqlens,
        max_seqlen_q=batch.bound,
        max_seqlen_k=batch.bound,
        mask=Mask(causal=True),
    )


def sdpa_nested(batch: Batch) -> Attend:
    """torch's SDPA on nested tensors, which know packed documents too; they want as many key heads as query heads."""

    def nested(x: Tensor, repeats: int = 1) -> Tensor:
        x = x.repeat_interleave(repeats, dim=1)
        bounds = {"min_seqlen": 1, "max_seqlen": batch.bound}
        return torch.nested.nested_tensor_from_jagged(x, batch.cu_seqlens, **bounds).transpose(1, 2)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        out = F.scaled_dot_product_attention(nested(q), nested(k, group), nested(v, group), is_causal=True)
        return out.transpose(1, 2).values()

    return attend


def sdpa_documents(batch: Batch) -> Attend:
    """One call of torch's SDPA for each document."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        split = [x.transpose(0, 1).unsqueeze(0).split(batch.lengths, dim=2) for x in (q, k, v)]
        outs = [F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True) for qkv in zip(*split, strict=True)]
        return torch.cat(outs, dim=2).squeeze(0).transpose(0, 1)

    return attend


def sdpa_padded(batch: Batch) -> Attend:
    """torch's SDPA on a batch of documents padded at their ends, which a causal mask hides from everything else."""
    starts = batch.cu_seqlens[:-1, None]
    gather = (starts + torch.arange(batch.bound, device=starts.device)).clamp(max=len(batch.inputs) - 1)
    document = torch.searchsorted(batch.cu_seqlens, torch.arange(len(batch.inputs), device=starts.device), right=True) - 1

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [x[gather].transpose(1, 2) for x in (q, k, v)]
        return F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True).transpose(1, 2)[document, batch.positions]

    return attend


def torch_varlen(batch: Batch) -> Attend:
    """torch's own function for packed sequences (CUDA only): the kernel that SDPA has behind nested tensors, without their overhead."""
    from torch.nn.attention.varlen import varlen_attn

    grouped = {"enable_gqa": True} if torch.__version__ >= (2, 13) else {}  # before, it goes without saying

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attn(q, k, v, batch.cu_seqlens, batch.cu_seqlens, batch.bound, batch.bound, window_size=(-1, 0), **grouped)

    return attend


ATTENTIONS = {f.__name__: f for f in (through_flash3, sdpa_nested, sdpa_padded, sdpa_documents, torch_varlen)}


# ---------------------------------------------------------------- the model


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: each pair (x_i, x_{i + head_dim / 2}) turned by its position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Block(nn.Module):
    """Attention and MLP, each behind an RMSNorm and added to the residual stream. Both add nothing at first."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = (size.heads, size.kv_heads, size.kv_heads)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(size.dim), nn.RMSNorm(size.dim)
        self.qkv = nn.Linear(size.dim, sum(self.heads) * size.head_dim, bias=False)
        self.out = nn.Linear(size.dim, size.dim, bias=False)
        self.up = nn.Linear(size.dim, 4 * size.dim, bias=False)
        self.down = nn.Linear(4 * size.dim, size.dim, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (sum(self.heads), -1)).split(self.heads, dim=1)
        x = x + self.out(attend(rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(1))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Batch → mean loss, in nats a byte. Weights and the residual stream are float32, matrix products and attention bfloat16."""

    def __init__(self, size: Size, attention: Callable[[Batch], Attend]) -> None:
        super().__init__()
        self.attention = attention
        self.embedding = nn.Embedding(VOCABULARY, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim)
        self.head = nn.Linear(size.dim, VOCABULARY, bias=False)
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(0, size.head_dim, 2) / size.head_dim))

    def forward(self, batch: Batch) -> Tensor:
        angles = (batch.positions[:, None] * self.frequencies)[:, None]
        cos, sin, attend = angles.cos(), angles.sin(), self.attention(batch)
        x = self.embedding(batch.inputs)
        for block in self.blocks:
            x = block(x, cos, sin, attend)
        return F.cross_entropy(self.head(self.norm(x)).float(), batch.targets)


# ---------------------------------------------------------------- training


class Run:
    """A model in training.

    Args:
        attention: a name in ATTENTIONS.
        compiled: a backend of torch.compile for the whole model in one graph, or None.
        dtype: of matrix products and attention.
    """

    def __init__(
        self, attention: str, size: Size, steps: int, device: torch.device, compiled: str | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        torch.manual_seed(0)
        self.name, self.size, self.device, self.compiled, self.dtype = attention, size, device, compiled, dtype
        self.model = GPT(size, ATTENTIONS[attention]).to(device)
        self.loss = torch.compile(self.model, fullgraph=True, backend=compiled) if compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        rise = max(1, round(WARM_UP * steps))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min((step + 1) / rise, 1 - step / (steps + 1)))
        self.losses: list[Tensor] = []
        self.speeds: list[float] = []

    def train(self, some: list[Batch]) -> None:
        """Some steps, and their tokens per second."""
        start = self._now()
        for batch in some:
            self._step(batch)
        self.speeds.append(sum(len(batch.inputs) for batch in some) / (self._now() - start))

    def _step(self, batch: Batch) -> None:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32):
            loss = self.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.losses.append(loss.detach())  # stays on the device: reading it here would make the host wait

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @property
    def tokens_per_second(self) -> float:
        """Median over the turns, without the first, which warms up and compiles."""
        return statistics.median(self.speeds[1:] or self.speeds)

    def curve(self) -> list[float]:
        return torch.stack(self.losses).tolist()


def take_turns(ours: Run, theirs: Run, some: list[Batch]) -> None:
    for first in range(0, len(some), TURN):
        for run in (ours, theirs):
            run.train(some[first : first + TURN])
        print(f"step {len(ours.losses):4d}  " + "  ".join(f"{run.name} {run.losses[-1]:.4f}" for run in (ours, theirs)), flush=True)


def fastest(names: list[str], make: Callable[[str], Run], warm_up: list[Batch], some: list[Batch]) -> str:
    """Of these attentions, in throw-away runs. What this torch or this GPU cannot do is told, and left out.

    Args:
        warm_up: batches of the first steps.
        some: other batches, for the steps that count: in training no batch comes again, and what a library prepares for each new
            length is part of its time.

    Raises:
        RuntimeError: none of them runs.
    """
    speeds = {}
    for name in names:
        run = make(name)
        try:
            run.train(warm_up)
            run.train(some)
        except (RuntimeError, TypeError, ImportError) as error:  # no such kernel or function, too little memory, another signature
            print(f"{run.name}: not here, {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)
            continue
        speeds[name] = run.speeds[-1]
        print(f"{run.name}: {run.speeds[-1]:,.0f} tokens/s", flush=True)
    if not speeds:
        raise RuntimeError(f"none of {', '.join(names)} runs here")
    return max(speeds, key=speeds.__getitem__)


def rivals(device: torch.device, compiled: str | None) -> list[str]:
    """What of torch's can run here. In one graph, a call for each document would be a compilation for each new set of lengths."""
    return [
        "sdpa_padded",
        *([] if compiled else ["sdpa_documents"]),
        *(["sdpa_nested", "torch_varlen"] if device.type == "cuda" else []),
    ]


# ---------------------------------------------------------------- results


def smooth(values: list[float]) -> list[float]:
    """Moving average, of full windows only."""
    width = min(SMOOTHING, len(values))
    sums = [0.0, *itertools.accumulate(values)]
    return [(end - begin) / width for begin, end in zip(sums, sums[width:], strict=False)]


def difference(ours: Run, theirs: Run) -> list[float]:
    """Of the smoothed losses, step by step."""
    return smooth([a - b for a, b in zip(ours.curve(), theirs.curve(), strict=True)])


def summary(ours: Run, theirs: Run) -> dict[str, Any]:
    """The comparison in a few numbers; the speed ratio is the median over the turns but the first."""
    ratios = [a / b for a, b in zip(ours.speeds, theirs.speeds, strict=True)]
    return {
        "tokens per second": {run.name: round(run.tokens_per_second) for run in (ours, theirs)},
        "speed ratio": round(statistics.median(ratios[1:] or ratios), 3),
        "last smoothed loss": {run.name: round(smooth(run.curve())[-1], 4) for run in (ours, theirs)},
        "largest smoothed difference": round(max(map(abs, difference(ours, theirs))), 5),
    }


def write(ours: Run, theirs: Run, path: Path) -> None:
    """Everything as JSON."""
    facts = {
        "device": torch.cuda.get_device_name() if ours.device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "size": asdict(ours.size),
        "compiled": ours.compiled,
        "summary": summary(ours, theirs),
        "runs": {
            run.name: {"losses": [round(loss, 5) for loss in run.curve()], "tokens per second": [round(speed) for speed in run.speeds]}
            for run in (ours, theirs)
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts) + "\n")


def draw(ours: Run, theirs: Run, path: Path) -> None:
    """Both loss curves, and below them their smoothed difference."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    curves, differences = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for run, style in ((ours, "-"), (theirs, "--")):
        curves.plot(run.curve(), style, linewidth=1, label=f"{run.name}, {run.tokens_per_second:,.0f} tokens/s")
    gap = difference(ours, theirs)
    differences.plot(range(len(ours.losses) - len(gap), len(ours.losses)), gap)
    for limit in (-LIMIT, LIMIT):
        differences.axhline(limit, color="grey", linestyle=":")
    title = f"GPT, {ours.size.layers} layers of width {ours.size.dim}, from scratch on Python's standard library"
    curves.set(ylabel="loss (nats per byte)", title=title)
    curves.legend()
    differences.set(xlabel="step", ylabel=f"difference, mean of {SMOOTHING} steps")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main(
    steps: Annotated[int, typer.Option(min=1, help="steps of each run")] = 300,
    device: Annotated[str, typer.Option(help="cpu (a tiny model) or cuda (a small one) [default: cuda if there is one]")] = "",
    baseline: Annotated[str, typer.Option(help=f"one of {', '.join(ATTENTIONS)} [default: the fastest of torch's]")] = "",
    compile: Annotated[bool, typer.Option("--compile", help="both models through torch.compile, each in one graph")] = False,
    table: Annotated[Path | None, typer.Option("--json", help="write losses and speeds here")] = None,
    picture: Annotated[Path | None, typer.Option(help="draw the curves here")] = None,
) -> None:
    """Train a small GPT through flash3 and through torch's attention, and compare losses and tokens per second."""
    where, compiled = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")), "inductor" if compile else None
    size = SIZES["small" if where.type == "cuda" else "tiny"]
    text = batches(size, steps, where)
    rehearsal = text[:TURN], text[TURN : 2 * TURN] or text[:TURN]
    make = functools.partial(Run, size=size, steps=steps, device=where, compiled=compiled)
    ours, theirs = make("through_flash3"), make(baseline or fastest(rivals(where, compiled), make, *rehearsal))
    take_turns(ours, theirs, text)
    print(json.dumps(summary(ours, theirs), indent=1))
    if table:
        write(ours, theirs, table)
    if picture:
        draw(ours, theirs, picture)


if __name__ == "__main__":
    typer.run(main)
