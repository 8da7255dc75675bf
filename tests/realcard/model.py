"""A small model that answers requests, and a training that fills the card: PyTorch, in lines of JSON as tenant.py's.

    model.py serve SECONDS     says {"ready"}, waits for a line, answers one request after the other for so long:
                               {"requests": n, "p50": microseconds, "p99": microseconds}
    model.py train             says {"ready"}, trains until its input ends: {"steps": n}

Without CUDA it runs on the CPU, to be tried.
"""

import json
import sys
import threading
import time

import torch

LAYERS, WIDTH, HEADS, TOKENS = 6, 512, 8, 64  # an encoder of 19 million parameters, as small classifiers have
TRAINED = 8192  # rows and columns of the training's matrices: more blocks than any card has room for at once
WARM_UP = 20


def print_line(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def serve(device: torch.device, seconds: float) -> None:
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval().to(device)
    request = torch.randn(1, TOKENS, WIDTH)
    took = []
    with torch.inference_mode():
        for _ in range(WARM_UP):
            model(request.to(device)).cpu()
        print_line(ready=True)
        sys.stdin.readline()
        ends = time.monotonic() + seconds
        while (began := time.monotonic()) < ends:
            model(request.to(device)).cpu()  # there and back, as for a client
            took.append(time.monotonic() - began)
    took.sort()
    points = {f"p{part}": round(took[len(took) * part // 100] * 1e6) for part in (50, 99)}
    print_line(requests=len(took), **points)


def train(device: torch.device) -> None:
    side = TRAINED if device.type == "cuda" else 256
    weights = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    batch = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    steps = 0
    print_line(ready=True)
    while not over.is_set():
        for _ in range(4):  # several are under way, so that the card never waits
            batch = torch.tanh(batch @ weights)
        if device.type == "cuda":
            torch.cuda.synchronize()
        steps += 4
    print_line(steps=steps)


def main(program: str, *numbers: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if program == "serve":
        serve(device, float(numbers[0]))
    else:
        train(device)


if __name__ == "__main__":
    main(*sys.argv[1:])
