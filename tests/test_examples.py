"""The examples run, and what they claim of their parts is true."""

import re
import subprocess
import sys
from pathlib import Path

import detr
import numpy as np
import pytest
import torch
import video

EXAMPLES = Path(__file__).parent.parent / "examples"
METRICS = {
    "vit": r"^RoPE, near tokens +\d+\.\d",
    "detr": r"^sine-cosine +0 +\d+\.\d +\d+\.\d$",
    "video": r"^rope +0 +\d+\.\d +\d+\.\d{3}",
}


@pytest.mark.parametrize("name", METRICS)
def test_an_example_prints_its_metric_and_writes_its_picture(name, tmp_path):
    picture = tmp_path / "picture.png"
    command = [sys.executable, "-W", "error", EXAMPLES / f"{name}.py", "--tiny", "--output", picture]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(METRICS[name], done.stdout, re.MULTILINE), done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_mean_average_precision_of_a_case_worked_out_by_hand():
    box = torch.tensor([2.0, 2.0, 1.0, 1.0])
    far = box + torch.tensor([0, 5.0, 0, 0])
    near_far = far + torch.tensor([0, (1 - 0.72) / (1 + 0.72), 0, 0])  # overlaps `far` by 0.72
    targets = [(torch.tensor([0, 0]), torch.stack([box, far])), (torch.tensor([1]), box[None])]
    # Of class 0, from the best score: right; the same object again; wrong, as the image has no such object;
    # right for thresholds up to 0.7. Of class 1: wrong; right.
    detections = [
        (torch.tensor([0.7, 0.8, 0.9]), torch.tensor([0, 0, 0]), torch.stack([near_far, box, box])),
        (torch.tensor([0.75, 0.8, 0.9]), torch.tensor([0, 1, 1]), torch.stack([far, box, far])),
    ]
    low = (51 * 1 + 50 * 2 / 4) / 101  # recalls up to 0.5, then up to 1
    high = 51 * 1 / 101
    both = detr.mean_average_precision(detections, targets)
    assert both == pytest.approx((100 * ((low + high) / 2 + 0.5) / 2, 100 * (low + 0.5) / 2))


def test_generalized_overlap_of_boxes_apart():
    # union 2, hull 3 x 1
    overlap, generalized = detr.iou(torch.tensor([1.0, 1, 1, 1]), torch.tensor([1.0, 3, 1, 1]))
    assert (overlap.item(), generalized.item()) == (0, pytest.approx(-1 / 3))


@pytest.fixture
def canvases():
    return detr.canvases(*detr.load_splits()["test"], 4, np.random.default_rng(0))


def test_boxes_enclose_the_ink(canvases):
    images, targets = canvases
    for image, (_, boxes) in zip(images[:, 0], targets, strict=True):
        rest = image.clone()
        for y, x, h, w in (boxes * detr.STRIDE).tolist():
            inside = (slice(round(y - h / 2), round(y + h / 2)), slice(round(x - w / 2), round(x + w / 2)))
            assert image[inside].amax() > 0.6
            rest[inside] = 0
        assert rest.amax() < 0.5  # noise has a deviation of 0.1


def test_matching_finds_the_order_in_which_queries_predict_the_objects(canvases):
    _, targets = canvases
    logits, boxes = torch.full((4, detr.QUERIES, 10), -5.0), torch.full((4, detr.QUERIES, 4), 30.0)
    image, query = [], []
    for i, (labels, wanted) in enumerate(targets):
        order = torch.randperm(detr.QUERIES)[: len(labels)]
        logits[i, order, labels], boxes[i, order] = 5.0, wanted
        image += [i] * len(labels)
        query += order.tolist()
    matched = detr.match(logits, boxes, targets)
    assert [part.tolist() for part in matched] == [image, query]


@pytest.mark.parametrize("kind", ["rope", "sine-cosine"])
def test_reference_points_get_gradients_through_attention(kind, canvases):
    model = detr.DETR(kind)
    logits, _ = model(canvases[0])[-1]  # they depend on points through attention alone
    logits.sum().backward()
    assert (model.points.grad != 0).all()
    assert (model.locate[-1].bias.grad[:2] != 0).all()  # where earlier layers moved the points


def test_a_film_moves_as_fast_as_it_says():
    clips, times, velocities = video.film(video.load_splits()["test"][0][:20], frames=4)
    centers = torch.arange(video.SIZE) + 0.5
    mass = clips.sum((2, 3))
    middle = (
        torch.stack([(clips.sum(3) * centers).sum(2), (clips.sum(2) * centers).sum(2)], -1) / mass[..., None]
    )
    way = velocities * (times[:, -1:] - times[:, :1])
    torch.testing.assert_close(middle[:, -1] - middle[:, 0], way, atol=1e-4, rtol=0)


def test_only_rope_can_not_tell_when_the_clock_started():
    clips, times, _ = video.film(torch.rand(4, 8, 8), frames=4)
    for kind, same in (("rope", True), ("sine-cosine", False)):
        model = video.VideoTransformer(kind)
        (now, _), (later, _) = model(clips, times), model(clips, times + 20)
        assert torch.allclose(now, later, atol=1e-4) == same
