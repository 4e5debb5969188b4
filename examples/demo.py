"""Train a small vision transformer on 8x8 digits with rotary positions, then show it larger token grids.

Two models, equal but for how they know where a token is: `RoPEEncodingND` on the queries and keys of every
block, or a learned table that is added to the tokens. A picture can grow in two ways, and both are tested:

* finer: the same picture at a higher resolution, so that the tokens lie closer together;
* wider: a larger canvas at the same resolution, with the digit anywhere on it.
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
import matplotlib.pyplot as plt  # noqa: E402

SIZE, PATCH = 8, 2
SIZES = {"finer": (8, 16, 24, 32), "wider": (8, 12, 16, 24)}
# (test, name): (kind of position, options of the forward pass).
METHODS = {
    ("finer", "learned table, bicubic"): ("table", {}),
    ("finer", "RoPE, raw pixel indices"): ("rope", {"raw_positions": True}),
    ("finer", "RoPE, scaled positions"): ("rope", {}),
    ("wider", "learned table, bicubic"): ("table", {}),
    ("wider", "learned table, log-length"): ("table", {"log_length": True}),
    ("wider", "RoPE"): ("rope", {}),
    ("wider", "RoPE, log-length"): ("rope", {"log_length": True}),
}


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kind: str):
        super().__init__()
        self.heads = heads
        self.rope = RoPEEncodingND(2, dim, heads) if kind == "rope" else None
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, pos: Tensor, sharpen: float) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        if self.rope is not None:
            q, k = self.rope(q, pos, k)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, scale=sharpen / math.sqrt(q.shape[-1]))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, kind: str, dim: int = 64, heads: int = 4, depth: int = 2):
        super().__init__()
        self.grid = SIZE // PATCH
        self.patch = nn.Conv2d(1, dim, PATCH, stride=PATCH)
        self.table = nn.Parameter(0.02 * torch.randn(1, dim, self.grid, self.grid)) if kind == "table" else None
        self.blocks = nn.ModuleList(Block(dim, heads, kind) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def embed(self, images: Tensor, zoom: int) -> Tensor:
        if zoom == 1:
            return self.patch(images)
        # A token must see the same part of the picture at every resolution, or what is tested is the patches
        # and not the positions. So the kernel grows with the picture (as in FlexiViT) and the stride does not.
        width = PATCH * zoom
        weight = F.interpolate(self.patch.weight, size=(width, width), mode="bilinear") / zoom**2
        return F.conv2d(F.pad(images, [(width - PATCH) // 2] * 4), weight, self.patch.bias, stride=PATCH)

    def forward(self, images: Tensor, zoom: int = 1, raw_positions=False, log_length=False) -> Tensor:
        x = self.embed(images, zoom)
        if self.table is not None:
            same = x.shape[-2:] == self.table.shape[-2:]
            x = x + (self.table if same else F.interpolate(self.table, size=x.shape[-2:], mode="bicubic"))
        x = x.permute(0, 2, 3, 1)
        # Centers of the tokens, in pixels: of the image as given, or of the image the model was trained on.
        pos = (RoPEEncodingND.position_grid(x.shape) + 0.5) * (PATCH if raw_positions else PATCH / zoom)
        x, pos = x.flatten(1, 2), pos.flatten(0, 1)
        # A softmax over more tokens is flatter; scores that grow with log N make up for that.
        sharpen = math.log(x.shape[1]) / math.log(self.grid**2) if log_length else 1.0
        for block in self.blocks:
            x = block(x, pos, sharpen)
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
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.05, fused=True)
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
    guesses = torch.cat([model(part, zoom, **options).argmax(1) for part in enlarge(images, size, test).split(75)])
    return 100 * (guesses == labels).float().mean().item()


def run(seeds: int, epochs: int, quick: bool) -> tuple[dict, dict, ViT]:
    """Accuracy on the test images, [seeds, sizes] per method, and on the validation images at one larger size."""
    splits = load_splits()
    tested = {key: np.zeros((seeds, 2 if quick else len(SIZES[key[0]]))) for key in METHODS}
    checked = {key: np.zeros(seeds) for key in METHODS}
    with tqdm(total=2 * seeds * epochs, unit="epoch") as bar:
        for seed in range(seeds):
            for kind in ("table", "rope"):
                bar.set_description(f"{kind}, seed {seed}")
                torch.manual_seed(seed)
                model = ViT(kind)
                train(model.train(), *splits["train"], epochs, bar)
                for (test, name), (wanted, options) in METHODS.items():
                    if wanted == kind:
                        key = test, name
                        for i in range(tested[key].shape[1]):
                            tested[key][seed, i] = accuracy(model, *splits["test"], SIZES[test][i], test, options)
                        checked[key][seed] = accuracy(model, *splits["val"], 16, test, options)
    return tested, checked, model


def report(tested: dict, checked: dict) -> None:
    for test, sizes in SIZES.items():
        rows = {name: values for (t, name), values in tested.items() if t == test}
        print(f"\n{test + ' (test accuracy, %)':<28}" + "".join(f"{f'{s}x{s}':>14}" for s in sizes))
        for name, values in rows.items():
            cells = (f"{v.mean():.1f} +- {v.std(ddof=1):.1f}" for v in values.T)
            print(f"{name:<28}" + "".join(f"{c:>14}" for c in cells))
