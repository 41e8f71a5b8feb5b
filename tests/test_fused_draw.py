"A draw with keyed noise costs few operations and one synchronisation, in one kernel none, and gives the tokens of the definition."

import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mixsd_nb.models import engine as engines
from mixsd_nb.models.engine import choose
from mixsd_nb.models.engine_vllm import KeyedRows, _KeyedRow

WAITS = {"nonzero", "_local_scalar_dense", "item", "masked_select", "unique", "_unique2"}  # operations whose result the host needs


class Counting(TorchDispatchMode):
    "Counts the operations that would each be a kernel on a GPU, and those for which the host would wait."
    VIEWS = {"view", "unsqueeze", "expand", "slice", "select", "split", "t", "transpose", "permute", "alias", "detach", "unbind", "empty",
             "empty_like", "as_strided", "lift_fresh", "_unsafe_view", "squeeze", "reshape"}

    def __init__(self):
        super().__init__()
        self.kernels = self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        boolean = name in ("index", "index_put_") and any(x is not None and x.dtype == torch.bool for x in args[1])
        self.waits += name in WAITS or boolean
        self.kernels += name not in self.VIEWS
        return func(*args, **(kwargs or {}))


def count(call):
    with Counting() as found: call()
    return found.kernels, found.waits


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    "Slices of the size that a GPU has."
    monkeypatch.setattr(engines, "_SLICES", dict(cpu=engines._SLICES["cuda"]))


def test_a_step_of_sampled_rows_waits_once(as_on_a_gpu, capsys):
    "Before, 100 rows of 151,936 tokens cost 424 kernels and 17 synchronisations by this count, and 400 rows 1,198 and 60."
    most = {100: (125, 1), 400: (175, 1)}
    for rows, limits in most.items():
        logits = 3 * torch.randn(rows, 151_936, generator=torch.Generator().manual_seed(0))
        processor = KeyedRows()
        processor.rows = {k: _KeyedRow(key=k, start=0, temperature=1.0, top_k=1 << 31, out=[5] * (k % 7)) for k in range(rows)}
        expected = choose(logits, torch.arange(rows), torch.arange(rows) % 7, 1.0, 1 << 31)
        found = count(lambda: processor.apply(logits))
        with capsys.disabled(): print(f"\n{rows} rows: {found[0]} kernels, {found[1]} synchronisations")
        assert found[0] <= limits[0] and found[1] <= limits[1] and torch.equal(logits.argmax(-1), expected)


INTERPRETED = """
import torch
from mixsd_nb.models.engine import _choose_from_all, gumbel
from mixsd_nb.models.fused_draw import draw
random = torch.Generator().manual_seed(1)
for rows, size, temperature, dtype in ((3, 70, 1.0, torch.float32), (4, 1_024, .7, torch.float32), (5, 3_001, .05, torch.bfloat16), (2, 2_500, 4.0, torch.float32)):
    logits = (4 * torch.randn(rows, size, generator=random)).to(dtype)
    logits[:, 5:9] = -torch.inf
    keys, position = torch.randint(-2**62, 2**62, (rows,), generator=random) * 2 + 1, torch.arange(rows) * 1_000
    noise = gumbel(keys[:, None], position[:, None], torch.arange(size))
    expected = (logits.float().double() / temperature + noise).argmax(-1)
    assert torch.equal(draw(logits, keys, position, temperature), expected) and torch.equal(_choose_from_all(logits, keys, position, temperature), expected)
    assert torch.equal(draw(logits[:, :size - 3], keys, position, temperature), (logits.float().double() / temperature + noise)[:, :size - 3].argmax(-1))
print("equal")
"""


def test_the_kernel_draws_the_tokens_of_the_definition():
    "Triton's interpreter runs it on a CPU."
    pytest.importorskip("triton", reason="a CPU build of PyTorch has no Triton; `make test-vllm` has it")
    found = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=os.environ | dict(TRITON_INTERPRET="1"))
    assert found.returncode == 0 and found.stdout == "equal\n", found.stderr[-3000:]


def test_a_kernel_that_draws_other_tokens_is_not_used(monkeypatch):
    "Nor one that cannot be compiled."
    from mixsd_nb.models import fused_draw
    works = lambda: engines.draws_in_one_pass.__wrapped__(torch.device("cpu"))
    monkeypatch.setattr(fused_draw, "draw", lambda *given: engines._choose_from_all(*given))
    assert works()
    monkeypatch.setattr(fused_draw, "draw", lambda *given: engines._choose_from_all(*given) ^ 1)
    assert not works()
    monkeypatch.setattr(fused_draw, "draw", lambda *given: 1 / 0)
    assert not works()
