"""Train a small video transformer to tell which digit moves, and how fast, from frames at irregular times.

Positions of tokens have three axes, (time, y, x), and are floats, as the time stamps of the frames are. Two
models, equal but for how they know positions: `RoPEEncodingND` on the queries and keys of every block, or
sine-cosine encodings added to the tokens. Both are tested on clips as in training, on clips with twice the
frames, and on clips whose clock started earlier, which only the first can't tell from the others.
"""

import argparse
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

DIGIT, SIZE, PATCH = 8, 16, 4  # in pixels
DURATION, FRAMES = 8, 6  # of a clip, in seconds, and how many frames are taken in this time
DIM, HEADS, DEPTH = 64, 4, 2
TESTS = {"as in training": (FRAMES, 0), "twice the frames": (2 * FRAMES, 0), "20 s later": (FRAMES, 20)}


class Block(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.rope = RoPEEncodingND(3, DIM, HEADS) if kind == "rope" else None
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x))
        if self.rope is not None:
            qkv = self.rope.rotate_qkv_(qkv, pos)
        q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def sine_cosine(pos: Tensor) -> Tensor:
    """``[..., 3]`` to ``[..., DIM]``, with the range of frequencies that RoPE starts from."""
    freqs = 10 ** -torch.linspace(0, 1, DIM // 6)
    angles = (pos[..., None] * freqs).flatten(-2)
    encoding = torch.cat((angles.sin(), angles.cos()), dim=-1)
    return F.pad(encoding, (0, DIM - encoding.shape[-1]))


class VideoTransformer(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.patch = nn.Conv2d(1, DIM, PATCH, stride=PATCH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 10 + 2)

    def forward(self, clips: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """Clips ``[B, T, SIZE, SIZE]``, times ``[B, T]``: logits ``[B, 10]``, velocities ``[B, 2]``."""
        x = self.patch(clips.flatten(0, 1)[:, None]).unflatten(0, times.shape).movedim(2, -1)
        pos = RoPEEncodingND.position_grid(x.shape).to(times.dtype).expand(*x.shape[:-1], 3).clone()
        pos[..., 0] = times[:, :, None, None]
        x, pos = x.flatten(1, 3), pos.flatten(1, 3)
        if self.kind == "sine-cosine":
            x = x + sine_cosine(pos)
        for block in self.blocks:
            x = block(x, pos)
        return self.head(self.norm(x).mean(1)).split((10, 2), dim=-1)


def film(digits: Tensor, frames: int, later: float = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Digits ``[B, DIGIT, DIGIT]`` on random straight ways: clips, times, velocities in pixels per second."""
    times = DURATION * torch.rand(len(digits), frames).sort(dim=1).values
    start, end = (SIZE - DIGIT) * torch.rand(2, len(digits), 1, 2)
    corners = start + (end - start) * times[..., None] / DURATION
    theta = torch.zeros(len(digits) * frames, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = SIZE / DIGIT
    # In units of half a digit, (x, y) of the canvas's middle from that of the digit.
    theta[:, :, 2] = ((SIZE - DIGIT) / 2 - corners.flip(-1)).flatten(0, 1) / (DIGIT / 2)
    grid = F.affine_grid(theta, [len(theta), 1, SIZE, SIZE], align_corners=False)
    images = F.grid_sample(digits.repeat_interleave(frames, 0)[:, None], grid, align_corners=False)
    return images.view(*times.shape, SIZE, SIZE), times + later, (end - start)[:, 0] / DURATION


def load_splits() -> dict[str, tuple[Tensor, Tensor]]:
    digits = load_digits()
    images = torch.tensor(digits.images / 8, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    train, test = train_test_split(np.arange(len(labels)), test_size=0.3, random_state=0)
    return {name: (images[part], labels[part]) for name, part in (("train", train), ("test", test))}


def train(model: VideoTransformer, images: Tensor, labels: Tensor, steps: int, bar: tqdm) -> None:
    batch, rate = 32, 2e-3
    optimizer = torch.optim.Adam(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        i = torch.randint(len(images), (batch,))
        clips, times, velocities = film(images[i], FRAMES)
        logits, guesses = model(clips, times)
        loss = F.cross_entropy(logits, labels[i]) + 5 * (guesses - velocities).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        bar.update()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.2f}")


@torch.inference_mode()
def test(model: VideoTransformer, images: Tensor, labels: Tensor, frames: int, later: float):
    """Accuracy of the digit in percent, mean absolute error of velocities."""
    torch.manual_seed(0)
    clips, times, velocities = film(images, frames, later)
    parts = [model(*part) for part in zip(clips.split(90), times.split(90), strict=True)]
    logits, guesses = (torch.cat(results) for results in zip(*parts, strict=True))
    return 100 * (logits.argmax(1) == labels).float().mean(), (guesses - velocities).abs().mean()


def plot(models: dict[str, VideoTransformer], images: Tensor, path: str) -> None:
    """Clips with all frames laid over each other, and their velocities."""
    torch.manual_seed(0)
    clips, times, velocities = film(images, FRAMES)
    with torch.inference_mode():
        shown = {"true": velocities, **{kind: model(clips, times)[1] for kind, model in models.items()}}
    fig, axes = plt.subplots(1, len(clips), figsize=(2.4 * len(clips), 2.8), layout="constrained")
    for i, ax in enumerate(axes):
        ax.imshow(clips[i].amax(0).numpy(), cmap="gray_r", extent=(0, SIZE, SIZE, 0))
        ax.set(xticks=[], yticks=[])
        for j, (name, each) in enumerate(shown.items()):
            y, x = (DURATION * each[i]).tolist()
            ax.quiver(
                8, 8, x, y, angles="xy", scale_units="xy", scale=1, color=f"C{j}", label=name, alpha=0.8
            )
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(shown))
    fig.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=2, help="models of each kind (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=800, help="of training (default: %(default)s)")
    parser.add_argument("--output", default="video.png", help="the picture (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="1 seed, few steps and images: does it run?")
    args = parser.parse_args()
    seeds, steps = (1, 3) if args.tiny else (args.seeds, args.steps)
    torch.set_num_threads(1)
    begin = time.perf_counter()
    splits, models, lines = load_splits(), {}, []
    if args.tiny:
        splits = {name: (images[:50], labels[:50]) for name, (images, labels) in splits.items()}
    with tqdm(total=2 * seeds * steps, unit="step") as bar:
        for seed in range(seeds):
            for kind in ("rope", "sine-cosine"):
                bar.set_description(f"{kind}, seed {seed}")
                torch.manual_seed(seed)
                model = models[kind] = VideoTransformer(kind)
                train(model, *splits["train"], steps, bar)
                cells = [test(model, *splits["test"], *setting) for setting in TESTS.values()]
                lines.append(
                    f"{kind:<12}{seed:>5}" + "".join(f"{right:>11.1f}{off:>9.3f}" for right, off in cells)
                )
    print("digits right, %, and mean error of velocities, pixels per second")
    print(f"{'positions':<12}{'seed':>5}" + "".join(f"{name:>20}" for name in TESTS), *lines, sep="\n")
    plot(models, splits["test"][0][:6], args.output)
    print(f"{args.output} written; {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
