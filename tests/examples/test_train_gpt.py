"""The training example on the CPU: what is in a batch, one loss through every attention, curves that lie on each other, one compilation."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from typer.testing import CliRunner

from examples import train_gpt
from examples.train_gpt import END, GPT, SIZES, Batch, Run

CPU = torch.device("cpu")
TINY = SIZES["tiny"]
PORTABLE = ["sdpa_padded", "sdpa_documents"]
RAGGED = [
    Batch.of([bytes(range(1, n + 2)) for n in lengths], 100, CPU) for lengths in ((5, 90, 1), (33, 63), (96,), (2, 3, 4, 87), (50, 46))
]


def test_batches_are_the_documents_in_order():
    size = replace(TINY, context=300, tokens=1000)
    found = train_gpt.batches(size, 30, CPU, seed=3)
    text = list(itertools.islice(train_gpt.documents(seed=3), 20))
    joined, position = b"".join(text), 0
    for batch in found:
        assert len(batch.inputs) == len(batch.targets) == len(batch.positions) == size.tokens == sum(batch.lengths)
        assert batch.cu_seqlens.tolist() == [0, *itertools.accumulate(batch.lengths)]
        assert max(batch.lengths) <= batch.bound == size.context
        for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
            piece = bytes(batch.inputs[start:end].tolist()) + bytes(batch.targets[end - 1 : end].tolist())
            assert piece[1:] == bytes(batch.targets[start:end].tolist())
            assert batch.positions[start:end].tolist() == list(range(end - start))
            assert END not in piece[:-1]
            if position < len(joined):
                position = joined.index(piece[: len(joined) - position], position) + len(piece) - (piece[-1:] != END)
    assert position > len(text[0])


def test_each_round_has_its_own_order():
    assert [a[:80] for a in itertools.islice(train_gpt.documents(0), 5)] != [a[:80] for a in itertools.islice(train_gpt.documents(1), 5)]


@pytest.mark.parametrize("baseline", PORTABLE)
def test_one_loss_and_one_gradient_through_every_attention(baseline):
    """In float32, with documents of very unequal lengths, one of a single token."""
    losses, gradients = [], []
    for name in ("through_flash3", baseline):
        torch.manual_seed(0)
        model = GPT(TINY, train_gpt.ATTENTIONS[name])
        for block in model.blocks:
            for weight in (block.out.weight, block.down.weight):  # zeros at first
                torch.nn.init.normal_(weight, std=0.1)
        losses.append(model(RAGGED[0]))
        gradients.append(torch.autograd.grad(losses[-1], list(model.parameters())))
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(*gradients, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)], ids=str)
def test_curves_lie_on_each_other(dtype, tolerance):
    runs = [Run(name, TINY, 24, CPU, dtype=dtype) for name in ("through_flash3", "sdpa_padded")]
    train_gpt.take_turns(*runs, train_gpt.batches(TINY, 24, CPU))
    ours, theirs = (run.curve() for run in runs)
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < tolerance
    assert ours[0] == pytest.approx(math.log(256), abs=0.3)
    assert ours[-1] < ours[0] - 0.5
    assert [len(run.speeds) for run in runs] == [3, 3]


def test_the_whole_model_compiles_to_one_graph():
    """Under autocast, with gradients. Other numbers and lengths of documents compile nothing again."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    size = replace(TINY, layers=1)
    compiled, eager = Run("through_flash3", size, 5, CPU, counter), Run("through_flash3", size, 5, CPU)
    compiled.train(RAGGED)
    eager.train(RAGGED)
    assert compiled.curve() == pytest.approx(eager.curve(), abs=0.01)
    assert counter.frame_count == 1


def test_command_writes_losses_speeds_and_a_picture(tmp_path):
    app = train_gpt.typer.Typer()
    app.command()(train_gpt.main)
    table, picture = tmp_path / "new" / "training.json", tmp_path / "training.png"
    done = CliRunner().invoke(app, ["--device", "cpu", "--steps", "21", "--json", str(table), "--picture", str(picture)])
    assert done.exit_code == 0, done.output
    facts = json.loads(table.read_text())
    assert facts["runs"].keys() < {"through_flash3", *PORTABLE}
    assert facts["summary"]["largest smoothed difference"] < train_gpt.LIMIT
    for run in facts["runs"].values():
        assert len(run["losses"]) == 21
        assert len(run["tokens per second"]) == 3
        assert min(run["tokens per second"]) > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_attention_that_does_not_run_here_is_no_rival(monkeypatch, capsys):
    def broken(batch):
        raise TypeError("got an unexpected keyword argument 'window_size'")

    monkeypatch.setitem(train_gpt.ATTENTIONS, "broken", broken)
    size = replace(TINY, layers=1)

    def make(name):
        return Run(name, size, 4, CPU)

    assert train_gpt.fastest(["broken", "sdpa_padded"], make, RAGGED, RAGGED) == "sdpa_padded"
    assert "broken: not here, TypeError: got an unexpected" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="none of broken runs here"):
        train_gpt.fastest(["broken"], make, RAGGED, RAGGED)


def test_smoothing():
    assert train_gpt.smooth([1.0, 3.0]) == [2.0]
    assert train_gpt.smooth([float(i) for i in range(train_gpt.SMOOTHING + 1)]) == [9.5, 10.5]
