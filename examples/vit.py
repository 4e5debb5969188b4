"""Train a small vision transformer on 8x8 digits with rotary positions, then show it larger token grids.

Three models, equal but for how they know where a token is: `RoPEEncodingND` on the queries and keys of every
block, or what is added to the tokens: a learned table, or sines and cosines of their positions. A picture can
grow in two ways, and both are tested:

* finer: the same picture at a higher resolution, so that the tokens lie closer together ("raw token indices",
  or "scaled positions", which stay within the extent of the training grid);
* wider: a larger canvas at the same resolution, with the digit anywhere on it ("near tokens": a token attends
  no further than it could in training).
"""

import argparse
import math
import time

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

from nd_rotary_encodings import RoPEEncodingND

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SIZE, PATCH = 8, 2
GRID = SIZE // PATCH
SIZES = {"finer": (8, 16, 24, 32), "wider": (8, 12, 16, 24)}
CHECK = 16  # in both tests, the size of the validation images
COLORS = {"rope": "tab:blue", "table": "tab:orange", "sine-cosine": "tab:green"}  # of the kinds of model
# (test, name): (kind of model, options of its forward).
METHODS = {
    ("finer", "learned table, bicubic"): ("table", {}),
    ("finer", "sine-cosine, scaled"): ("sine-cosine", {}),
    ("finer", "RoPE, raw token indices"): ("rope", {"raw_positions": True}),
    ("finer", "RoPE, scaled positions"): ("rope", {}),
    ("wider", "learned table, bicubic"): ("table", {}),
    ("wider", "learned table, near tokens"): ("table", {"near_only": True}),
    ("wider", "sine-cosine"): ("sine-cosine", {}),
    ("wider", "sine-cosine, near tokens"): ("sine-cosine", {"near_only": True}),
    ("wider", "RoPE"): ("rope", {}),
    ("wider", "RoPE, near tokens"): ("rope", {"near_only": True}),
}


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kind: str):
        super().__init__()
        self.heads = heads
        self.rope = RoPEEncodingND(2, dim, heads) if kind == "rope" else None
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, pos: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        if self.rope is not None:
            q, k = self.rope(q, pos, k)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def sine_cosine(pos: Tensor, dim: int) -> Tensor:
    """``[..., 2]`` to ``[..., dim]``, with the range of frequencies that RoPE starts from."""
    freqs = 10 ** -torch.linspace(0, 1, dim // 4)
    angles = (pos[..., None] * freqs).flatten(-2)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class ViT(nn.Module):
    def __init__(self, kind: str, dim: int = 64, heads: int = 8, depth: int = 2):
        super().__init__()
        self.kind = kind
        self.patch = nn.Conv2d(1, dim, PATCH, stride=PATCH)
        self.table = nn.Parameter(0.02 * torch.randn(1, dim, GRID, GRID)) if kind == "table" else None
        self.blocks = nn.ModuleList(Block(dim, heads, kind) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def embed(self, images: Tensor, zoom: int) -> Tensor:
        if zoom == 1:
            return self.patch(images)
        # A token must see as much of the picture as in training, or the test is one of patches: the kernel
        # grows with the picture (as in FlexiViT), and the stride does not.
        width = PATCH * zoom
        weight = F.interpolate(self.patch.weight, size=(width, width), mode="bilinear") / zoom**2
        return F.conv2d(F.pad(images, [(width - PATCH) // 2] * 4), weight, self.patch.bias, stride=PATCH)

    def forward(self, images: Tensor, zoom: int = 1, raw_positions=False, near_only=False) -> Tensor:
        x = self.embed(images, zoom)
        if self.table is not None:
            same = x.shape[-2:] == self.table.shape[-2:]
            x = x + (self.table if same else F.interpolate(self.table, size=x.shape[-2:], mode="bicubic"))
        x = x.permute(0, 2, 3, 1)
        pos = RoPEEncodingND.position_grid(x.shape).float()
        if not raw_positions:
            # Centers of the tokens, in tokens of the training grid.
            pos = (pos + 0.5) / zoom - 0.5
        x, pos = x.flatten(1, 2), pos.flatten(0, 1)
        if self.kind == "sine-cosine":
            x = x + sine_cosine(pos, x.shape[-1])
        # In training no token was further from another than this.
        mask = torch.cdist(pos, pos, p=math.inf) < GRID if near_only else None
        for block in self.blocks:
            x = block(x, pos, mask)
        # The maximum, as the blank tokens of a wide canvas would drown the digit in a mean.
        return self.head(self.norm(x.amax(1)))


def load_splits() -> dict[str, tuple[Tensor, Tensor]]:
    digits = load_digits()
    images = torch.tensor(digits.images / 8, dtype=torch.float32)[:, None]
    labels = torch.tensor(digits.target)
    rest, test = train_test_split(np.arange(len(labels)), test_size=450, random_state=0, stratify=labels)
    train, val = train_test_split(rest, test_size=300, random_state=0, stratify=labels[rest])
    return {name: (images[i], labels[i]) for name, i in (("train", train), ("val", val), ("test", test))}


def augment(images: Tensor) -> Tensor:
    """Shift by up to a pixel and zoom by up to a third, at random."""
    theta = torch.zeros(len(images), 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = torch.empty(len(images)).uniform_(-0.3, 0.3).exp()
    theta[:, :, 2].uniform_(-2 / SIZE, 2 / SIZE)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def train(model: ViT, images: Tensor, labels: Tensor, epochs: int, bar: tqdm) -> None:
    batch, rate = 64, 3e-3
    # Decay would turn frequencies into zeros: no positions at all.
    freqs = [p for name, p in model.named_parameters() if ".rope.freqs." in name]
    others = [p for name, p in model.named_parameters() if ".rope.freqs." not in name]
    groups = [{"params": freqs, "weight_decay": 0}, {"params": others, "weight_decay": 0.05}]
    optimizer = torch.optim.AdamW(groups, rate, fused=True)
    steps = epochs * math.ceil(len(images) / batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.2)
    for _ in range(epochs):
        for i in torch.randperm(len(images)).split(batch):
            loss = F.cross_entropy(model(augment(images[i])), labels[i], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        bar.update()
        bar.set_postfix(loss=f"{loss.item():.2f}")


def enlarge(images: Tensor, size: int, test: str) -> Tensor:
    if test == "finer":
        return F.interpolate(images, size=(size, size), mode="bilinear")
    canvas = images.new_zeros(len(images), 1, size, size)
    corners = np.random.default_rng(size).integers(0, size - SIZE, (len(images), 2), endpoint=True)
    for image, target, (i, j) in zip(images, canvas, corners, strict=True):
        target[:, i : i + SIZE, j : j + SIZE] = image
    return canvas


@torch.inference_mode()
def accuracy(model: ViT, images: Tensor, labels: Tensor, size: int, test: str, options: dict) -> float:
    zoom = size // SIZE if test == "finer" else 1
    parts = enlarge(images, size, test).split(75)
    guesses = torch.cat([model(part, zoom, **options).argmax(1) for part in parts])
    return 100 * (guesses == labels).float().mean().item()


def run(splits: dict, seeds: int, epochs: int, sizes: dict) -> tuple[dict, dict, ViT]:
    """Test accuracy [seeds, sizes] of each method, validation accuracy [seeds] at one size, a RoPE model."""
    tested = {key: np.zeros((seeds, len(sizes[key[0]]))) for key in METHODS}
    checked = {key: np.zeros(seeds) for key in METHODS}
    with tqdm(total=len(COLORS) * seeds * epochs, unit="epoch") as bar:
        for seed in range(seeds):
            for kind in reversed(COLORS):  # RoPE last, as that model is drawn
                bar.set_description(f"{kind}, seed {seed}")
                torch.manual_seed(seed)
                model = ViT(kind)
                train(model, *splits["train"], epochs, bar)
                for key, (wanted, options) in METHODS.items():
                    if wanted == kind:
                        checked[key][seed] = accuracy(model, *splits["val"], CHECK, key[0], options)
                        for i, size in enumerate(sizes[key[0]]):
                            tested[key][seed, i] = accuracy(model, *splits["test"], size, key[0], options)
    return tested, checked, model


def compare(tested: dict, one: tuple, other: tuple, beyond: bool) -> None:
    gain = tested[one] - tested[other]
    gain = gain[:, 1:].mean(1) if beyond else gain[:, 0]
    won, n = int((gain > 0).sum()), len(gain)
    word = "is ahead of" if won == n else "is behind" if (gain < 0).all() else "is not clearly apart from"
    print(f"* {'beyond' if beyond else 'at'} {SIZE}x{SIZE}, [{one[1]}] {word} [{other[1]}]:")
    print(f"  {gain.mean():+.1f} points (std {gain.std(ddof=1):.1f}), better in {won} of {n} seeds")


def report(tested: dict, checked: dict, sizes: dict) -> None:
    for test in sizes:
        print(f"\n{test + ': test accuracy, %':<28}" + "".join(f"{f'{n}x{n}':>14}" for n in sizes[test]))
        # Which variants are compared is decided on the validation images, not on those of the table.
        ranked = sorted((key for key in METHODS if key[0] == test), key=lambda key: -checked[key].mean())
        for key in ranked:
            cells = [f"{v.mean():.1f} +- {v.std(ddof=1):.1f}" for v in tested[key].T]
            print(f"{key[1]:<28}" + "".join(f"{cell:>14}" for cell in cells))
        print(f"* this order is that of the accuracy on {CHECK}x{CHECK} validation images:")
        print("  " + ", ".join(f"[{key[1]}] {checked[key].mean():.1f}" for key in ranked))
        ropes, *others = ([key for key in ranked if METHODS[key][0] == kind] for kind in COLORS)
        for other in others:
            compare(tested, ropes[0], other[0], beyond=False)
            compare(tested, ropes[0], other[0], beyond=True)
        compare(tested, ropes[0], ropes[1], beyond=True)


@torch.inference_mode()
def head_scores(rope: RoPEEncodingND, reach: float, points: int = 97) -> np.ndarray:
    """Scores [heads, points, points] of keys around a query in the middle, with every channel one."""
    axis = torch.linspace(-reach, reach, points)
    ones = torch.ones(points**2, rope.embed_dim)
    q, k = rope(ones[:1], torch.zeros(1, 2), ones, torch.cartesian_prod(axis, axis))
    return (q * k).unflatten(-1, (rope.n_heads, -1)).mean(-1).T.unflatten(-1, (points, points)).numpy()


def plot(tested: dict, sizes: dict, rope: RoPEEncodingND, path: str) -> None:
    fig = plt.figure(figsize=(13, 4.8), layout="constrained")
    left, right = fig.subfigures(1, 2, width_ratios=(2, 1), wspace=0.04)
    titles = {"finer": "Finer: the same picture, resized", "wider": "Wider: the digit anywhere on a canvas"}
    for ax, test in zip(left.subplots(1, 2, sharey=True), sizes, strict=True):
        for i, key in enumerate(key for key in METHODS if key[0] == test):
            kind, options = METHODS[key]
            style = {"color": COLORS[kind], "ls": "--" if options else "-"}
            x = np.array(sizes[test]) + 0.2 * (i - 1)
            mean, std = tested[key].mean(0), tested[key].std(0, ddof=1)
            ax.errorbar(x, mean, std, label=key[1], marker="o", capsize=4, **style)
        ax.set(title=titles[test], xlabel=f"side of the image, pixels (trained at {SIZE})", ylim=(0, 102))
        ax.set_xticks(sizes[test])
        ax.grid(alpha=0.3)
        ax.legend(loc="lower left" if test == "finer" else "upper right", fontsize=8)
    left.axes[0].set_ylabel(f"test accuracy, % (mean, std of {len(tested[key])} seeds)")
    reach = 2.0 * GRID
    for head, ax in enumerate(right.subplots(2, 2, sharex=True, sharey=True).flat):
        scores = head_scores(rope, reach)[head]
        image = ax.imshow(scores, extent=(-reach, reach, reach, -reach), vmin=-1, vmax=1, cmap="RdBu")
        ax.add_patch(plt.Rectangle((0.5 - GRID,) * 2, 2 * GRID - 1, 2 * GRID - 1, fill=False, ls=":"))
        ax.set_title(f"head {head}", fontsize=10)
    right.suptitle(
        "Rotation alone: score of each position for a\nquery in the middle (dotted: reach in training)"
    )
    right.supxlabel("tokens to the right", fontsize=10)
    right.supylabel("tokens down", fontsize=10)
    right.colorbar(image, ax=right.axes, shrink=0.8, label="mean cosine")
    fig.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="models of each kind (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=30, help="epochs of training (default: %(default)s)")
    parser.add_argument("--output", default="vit.png", help="the picture (default: %(default)s)")
    parser.add_argument(
        "--tiny", action="store_true", help="2 seeds, 1 epoch, few images and sizes: does it run?"
    )
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error("--seeds must be at least 2, as the spread over seeds is reported")
    seeds, epochs = (2, 1) if args.tiny else (args.seeds, args.epochs)
    splits = load_splits()
    if args.tiny:
        splits = {name: (images[:50], labels[:50]) for name, (images, labels) in splits.items()}
    sizes = {test: (n[:2] if args.tiny else n) for test, n in SIZES.items()}
    torch.use_deterministic_algorithms(True)
    # The tensors are too small to share among cores, and the result must not depend on how many there are.
    torch.set_num_threads(1)
    start = time.perf_counter()
    tested, checked, model = run(splits, seeds, epochs, sizes)
    report(tested, checked, sizes)
    plot(tested, sizes, model.blocks[0].rope, args.output)
    print(f"\n{args.output} written; {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
