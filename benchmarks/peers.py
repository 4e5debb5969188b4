"""Queries and keys rotated by this package, by compiled PyTorch and by other packages, side by side.

    python benchmarks/peers.py [--peers FOLDER] [--quick] [--threads N] [--output FOLDER]

Two jobs, each in inference and in training, in float32 and bfloat16:

* mixed: the angles follow from 2-D positions and learned frequencies per head, at each call; training gives
  gradients to queries, keys and frequencies.
* axial: the frequencies are fixed and common to all heads, half of the channels for each axis; who can be
  given a table of cosines and sines is given one made before. Training gives gradients to queries and keys.

All take turns. Unit: the median time of copying queries and keys. Every peer is measured where it does the
job and is there: rotary-embedding-torch, transformers and timm where they are installed (of timm one file is
loaded; the rest of it needs torchvision), naver-ai/rope-vit and mawright/nd-rotary-encodings as checkouts of
their repositories in FOLDER. "Error" is the largest one of a rotated query, in units of the largest query.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import definitions
import measure
import torch
from torch import Tensor

from nd_rotary_encodings import RoPEEncodingND, apply_rope_qk, reference

BATCH, SIDE, HEADS, HEAD_DIM = 4, 64, 8, 32
PAIRS = HEAD_DIM // 2
compiled = partial(torch.compile, dynamic=False)


@dataclass
class Contestant:
    name: str
    rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # queries and keys
    layout: str = "interleaved"
    heads_first: bool = False  # [B, H, N, D] rather than [B, N, H, D]
    shape: tuple[int, ...] | None = None  # in which it wants its queries
    learned: Tensor | None = None


@dataclass
class Job:
    name: str
    positions: Tensor
    freqs: Tensor
    contestants: list[Contestant]


# ---- what is there


def import_timm():
    """timm's file on position embeddings, without importing all of timm."""
    if "timm" not in sys.modules:
        spec = importlib.util.find_spec("timm")
        if spec is None:
            raise ImportError("No module named 'timm'")
        folder = spec.submodule_search_locations[0]
        for name, path in (("timm", folder), ("timm.layers", f"{folder}/layers")):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [path]
    return importlib.import_module("timm.layers.pos_embed_sincos")


def import_from(folder: Path, name: str):
    """A module of that folder, even if it bears the name of one that is loaded."""
    if importlib.machinery.PathFinder.find_spec(name, [str(folder)]) is None:
        raise ImportError(f"no {name} in {folder}")
    loaded = {key: sys.modules.pop(key) for key in list(sys.modules) if key.split(".")[0] == name}
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)
        sys.modules.update(loaded)


# ---- mixed: [1, N, 2] positions, learned frequencies [2, H, F]


def ours(positions: Tensor, freqs: Tensor) -> Iterator[Contestant]:
    learned = freqs if freqs.requires_grad else None

    def rotate(q, k, **settings):
        return apply_rope_qk(q, k, positions, freqs, **settings)

    yield Contestant("ours", rotate, learned=learned)
    yield Contestant("ours, half-split", partial(rotate, layout="half"), "half", learned=learned)
    yield Contestant(
        "ours, [B, H, N, D]", partial(rotate, head_dim_first=True), heads_first=True, learned=learned
    )


def by_definition(positions: Tensor, freqs: Tensor) -> Iterator[Contestant]:
    def rotate(q, k, turn):
        table = definitions.cos_sin(positions, freqs)
        return turn(q, *table), turn(k, *table)

    complex_numbers = partial(rotate, turn=definitions.rotate_complex)
    yield Contestant("eager, complex", complex_numbers, learned=freqs)
    for layout, turn in definitions.LAYOUTS.items():
        eager = partial(rotate, turn=turn)
        yield Contestant(f"eager, {layout}", eager, layout, learned=freqs)
        yield Contestant(f"torch.compile, {layout}", compiled(eager), layout, learned=freqs)


def original(positions: Tensor, freqs: Tensor, peers: Path) -> Iterator[Contestant]:
    package = import_from(peers / "nd-rotary-encodings", "nd_rotary_encodings")
    module = package.RoPEEncodingND(2, HEADS * HEAD_DIM, HEADS)
    learned = module.freqs[0]
    learned.data = freqs.detach().view_as(learned).clone()
    positions = positions.expand(BATCH, -1, -1)
    wanted = (BATCH, SIDE**2, HEADS * HEAD_DIM)
    yield Contestant("original", lambda q, k: module(q, positions, k), shape=wanted, learned=learned)


def rope_vit(positions: Tensor, freqs: Tensor, peers: Path) -> Iterator[Contestant]:
    code = import_from(peers / "rope-vit" / "self-attn", "rope_self_attn")
    learned = freqs.detach().flatten(1).clone().requires_grad_()
    first, second = positions[0].unbind(-1)

    def rotate(q, k):
        return code.apply_rotary_emb(q, k, code.compute_mixed_cis(learned, first, second, HEADS))

    yield Contestant("rope-vit", rotate, heads_first=True, learned=learned)


def timm_mixed(positions: Tensor, freqs: Tensor) -> Iterator[Contestant]:
    code = import_timm()
    module = code.RotaryEmbeddingMixed(HEADS * HEAD_DIM, 1, HEADS, feat_shape=[SIDE, SIDE])
    # the first of its axes runs along rows
    module.freqs.data = freqs.detach().flip(0).view_as(module.freqs).clone()

    def rotate(q, k):
        table = module.get_embed()[0]
        return code.apply_rot_embed_cat(q, table), code.apply_rot_embed_cat(k, table)

    yield Contestant("timm", rotate, heads_first=True, learned=module.freqs)
    yield Contestant("timm, torch.compile", compiled(rotate), heads_first=True, learned=module.freqs)


# ---- axial: the same positions, fixed frequencies [2, 1, F]


def by_table(positions: Tensor, freqs: Tensor, dtype: torch.dtype) -> Iterator[Contestant]:
    table = [t.to(dtype) for t in definitions.cos_sin(positions, freqs)]
    for layout, turn in definitions.LAYOUTS.items():
        rotate = compiled(lambda q, k, turn=turn: (turn(q, *table), turn(k, *table)))
        yield Contestant(f"torch.compile, {layout}, table", rotate, layout)


def timm_axial(positions: Tensor, freqs: Tensor, dtype: torch.dtype) -> Iterator[Contestant]:
    code = import_timm()
    cos, sin = (t[0, :, 0].repeat_interleave(2, -1) for t in definitions.cos_sin(positions, freqs))
    table = torch.cat((sin, cos), -1).to(dtype)

    def rotate(q, k):
        return code.apply_rot_embed_cat(q, table), code.apply_rot_embed_cat(k, table)

    yield Contestant("timm, table", rotate, heads_first=True)
    yield Contestant("timm, table, torch.compile", compiled(rotate), heads_first=True)


def rotary_embedding_torch(positions: Tensor, freqs: Tensor) -> Iterator[Contestant]:
    package = importlib.import_module("rotary_embedding_torch")
    module = package.RotaryEmbedding(HEAD_DIM // 2, custom_freqs=freqs[0, 0, : PAIRS // 2])
    angles = module.get_axial_freqs(SIDE, SIDE)

    def rotate(q, k):
        return package.apply_rotary_emb(angles, q), package.apply_rotary_emb(angles, k)

    shape = (BATCH, HEADS, SIDE, SIDE, HEAD_DIM)
    yield Contestant("rotary-embedding-torch, table of angles", rotate, heads_first=True, shape=shape)


def hugging_face(positions: Tensor, freqs: Tensor, dtype: torch.dtype) -> Iterator[Contestant]:
    code = importlib.import_module("transformers.models.llama.modeling_llama")
    table = [t[:, :, 0].repeat(1, 1, 2).to(dtype) for t in definitions.cos_sin(positions, freqs)]

    def rotate(q, k):
        return code.apply_rotary_pos_emb(q, k, *table)

    yield Contestant("Hugging Face, table", rotate, "half", heads_first=True)
    yield Contestant("Hugging Face, table, torch.compile", compiled(rotate), "half", heads_first=True)


def jobs(peers: Path, dtype: torch.dtype) -> Iterator[Job]:
    positions = RoPEEncodingND.position_grid((1, SIDE, SIDE, 1), dtype=torch.float32).view(1, SIDE**2, 2)
    freqs = (torch.randn(2, HEADS, PAIRS) * 0.3).requires_grad_()
    where = {"positions": positions, "freqs": freqs}
    contestants = (
        ours(**where),
        by_definition(**where),
        original(**where, peers=peers),
        rope_vit(**where, peers=peers),
        timm_mixed(**where),
    )
    yield Job("mixed", **where, contestants=those_there(contestants))

    each, none = 100.0 ** -torch.linspace(0, 1, PAIRS // 2), torch.zeros(PAIRS // 2)
    freqs = torch.stack((torch.cat((each, none)), torch.cat((none, each))))[:, None]
    where = {"positions": positions, "freqs": freqs}
    contestants = (
        ours(**where),
        by_table(**where, dtype=dtype),
        timm_axial(**where, dtype=dtype),
        rotary_embedding_torch(**where),
        hugging_face(**where, dtype=dtype),
    )
    yield Job("axial", **where, contestants=those_there(contestants))


def those_there(contestants: Iterable[Iterator[Contestant]]) -> list[Contestant]:
    found = []
    for some in contestants:
        try:
            found += some
        except ImportError as error:
            print(f"left out: {some.__name__}: {error}")
    return found


# ---- measuring


def prepare(contestant: Contestant, job: Job, q: Tensor, k: Tensor, training: bool):
    """A function that does the job once, and the error of what it gives."""
    inputs = [x.transpose(1, 2).contiguous() if contestant.heads_first else x for x in (q, k)]
    inputs = [x.view(contestant.shape or x.shape).clone().requires_grad_(training) for x in inputs]
    leaves = inputs + [contestant.learned] * (contestant.learned is not None)
    grads = [torch.randn_like(x) for x in inputs]

    def call():
        with torch.set_grad_enabled(training):
            outputs = contestant.rotate(*inputs)
        return torch.autograd.grad(outputs, leaves, grads) if training else outputs

    with torch.no_grad():
        got = contestant.rotate(*inputs)[0]
        got = got.view(BATCH, HEADS, -1, HEAD_DIM).transpose(1, 2) if contestant.heads_first else got
        block = HEAD_DIM if contestant.layout == "half" else 2
        wanted = reference.apply_rope(q.double(), job.positions, job.freqs, block=block)
        error = ((got.reshape(q.shape).double() - wanted).abs().max() / q.abs().max()).item()
    assert error < 0.05, f"{contestant.name} does other work, error {error:.1e}"
    return call, error


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--peers", type=Path, default=Path("peers"), metavar="FOLDER")
    options = parser.parse_args()
    about = measure.start(options)
    results = []
    for dtype in (torch.float32,) if options.quick else (torch.float32, torch.bfloat16):
        for job in jobs(options.peers, dtype):
            for training in (False, True):
                torch.compiler.reset()
                q, k = torch.randn(2, BATCH, SIDE**2, HEADS, HEAD_DIM).to(dtype)
                calls, errors = {}, {}
                for one in job.contestants:
                    calls[one.name], errors[one.name] = prepare(one, job, q, k, training)
                calls["copy"] = lambda q=q, k=k: (q.clone(), k.clone())
                times = measure.in_turn(calls, 0 if options.quick else 10)
                unit, size = times.pop("copy"), q.nbytes + k.nbytes
                setting = {
                    "job": job.name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "mode": "training" if training else "inference",
                }
                print(
                    f"\n{', '.join(setting.values()):46}{'time':>8}{'quartiles':>16}{'peak':>7}{'error':>9}"
                )
                for name, its in times.items():
                    result = measure.ratio_to(unit, its)
                    peak, error = measure.peak_bytes(calls[name]) / size, errors[name]
                    quartiles = f"{result['low']:.2f} to {result['high']:.2f}"
                    print(
                        f"  {name:44}{result['ratio']:8.2f}{quartiles:>16}{peak:7.2f}{error:9.0e}", flush=True
                    )
                    memory = {"unit_ms": measure.median_ms(unit), "peak": peak, "error": error}
                    results.append({**about, **setting, "variant": name, **result, **memory})
    measure.write(options.output, "peers", results)


if __name__ == "__main__":
    main()
