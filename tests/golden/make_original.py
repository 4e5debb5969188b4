"""Writes original.json: what the package mawright/nd-rotary-encodings gives, whose modules and state dicts
this one stands in for. Run by hand where that package is installed instead of this one:

    git clone https://github.com/mawright/nd-rotary-encodings
    git -C nd-rotary-encodings checkout 0451701
    PYTHONPATH=nd-rotary-encodings python tests/golden/make_original.py

Frequencies are those of the seed in float32; outputs are computed in float64 from the frequencies so rounded.
"""

import json
from pathlib import Path

import torch

from nd_rotary_encodings import RoPEEncodingND

CONFIGURATIONS = {
    "two axes": {"position_dim": 2, "embed_dim": 16, "n_heads": 2},
    "one axis, shared heads": {"position_dim": 1, "embed_dim": 12, "n_heads": 3, "share_heads": True},
    "groups": {
        "position_dim": 3,
        "embed_dim": 16,
        "n_heads": 2,
        "freq_group_pattern": [[True, True, False], [False, False, True]],
    },
    "groups, shared heads": {
        "position_dim": 3,
        "embed_dim": 16,
        "n_heads": 2,
        "freq_group_pattern": [[True, True, False], [False, False, True]],
        "share_heads": True,
    },
    "unequal groups": {
        "position_dim": 2,
        "embed_dim": 20,
        "n_heads": 2,
        "freq_group_pattern": [[True, True], [True, False], [False, True]],
        "enforce_freq_groups_equal": False,
    },
    "theta": {"position_dim": 2, "embed_dim": 16, "n_heads": 2, "rope_base_theta": 100.0},
    "theta per axis": {"position_dim": 2, "embed_dim": 16, "n_heads": 2, "rope_base_theta": [[10.0, 1000.0]]},
    "theta per group": {
        "position_dim": 2,
        "embed_dim": 16,
        "n_heads": 2,
        "freq_group_pattern": [[True, True], [False, True]],
        "rope_base_theta": [[10.0], [100.0]],
    },
    "theta per group and axis": {
        "position_dim": 2,
        "embed_dim": 16,
        "n_heads": 2,
        "freq_group_pattern": [[True, True], [False, True]],
        "rope_base_theta": [[10.0, 100.0], [20.0, 50.0]],
    },
}
TENSORS = ("freq_group_pattern", "rope_base_theta")


def row(seed: int, arguments: dict) -> dict:
    torch.manual_seed(seed)
    module = RoPEEncodingND(
        **{
            name: torch.tensor(a) if name in TENSORS and isinstance(a, list) else a
            for name, a in arguments.items()
        }
    )
    state = {name: value.tolist() for name, value in module.state_dict().items()}
    query = torch.randint(-16, 17, (3, arguments["embed_dim"])).double() / 8
    positions = torch.randint(-400, 400, (3, arguments["position_dim"])).double() / 8
    with torch.no_grad():
        output = module.double()(query, positions)
    return {
        "seed": seed,
        "arguments": arguments,
        "state": state,
        "query": query.tolist(),
        "positions": positions.tolist(),
        "output": [[round(value, 14) for value in values] for values in output.tolist()],
    }


if __name__ == "__main__":
    rows = {name: row(seed, arguments) for seed, (name, arguments) in enumerate(CONFIGURATIONS.items())}
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(values)}" for name, values in rows.items())
    Path(__file__).with_name("original.json").write_text("{" + text + "}\n")
