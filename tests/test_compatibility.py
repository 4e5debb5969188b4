"""Against numbers that the original package gave; golden/make_original.py says which and makes them again."""

import json
from pathlib import Path

import pytest
import torch

from nd_rotary_encodings import RoPEEncodingND

ROWS = json.loads((Path(__file__).parent / "golden" / "original.json").read_text())
every_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())


def module_of(row, seed: int) -> RoPEEncodingND:
    torch.manual_seed(seed)
    return RoPEEncodingND(**row["arguments"])


def state_of(row, module) -> dict:
    return {name: torch.tensor(row["state"][name], dtype=t.dtype) for name, t in module.state_dict().items()}


@every_row
def test_the_seed_gives_the_state_of_the_original(row):
    module = module_of(row, row["seed"])
    state = module.state_dict()
    assert list(state) == list(row["state"])
    for name, expected in state_of(row, module).items():
        # which sine the platform has may show in the last bit
        torch.testing.assert_close(state[name], expected, rtol=1e-6, atol=1e-7)


@every_row
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str)
def test_with_the_state_of_the_original_the_output_is_the_same(row, dtype, tolerance):
    module = module_of(row, row["seed"] + 1)
    assert not module.load_state_dict(state_of(row, module), strict=True).missing_keys
    query, positions, expected = (
        torch.tensor(row[name], dtype=dtype) for name in ("query", "positions", "output")
    )
    torch.testing.assert_close(module.to(dtype)(query, positions), expected, rtol=tolerance, atol=tolerance)
