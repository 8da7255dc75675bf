"""Follows one review through the webhook: the modules that it passes, the returns from one module into another, and the
CPU time. Needs no cluster.
"""

import sys
import time
from collections import Counter
from types import FrameType
from typing import Any

from bench import timing
from bench.timing import Row
from cardwise.core.values.quantity import MiB
from tests.build import pod
from tests.webhook.reviews import Known, body, patched
from webhook.cluster.cards import CardSizes
from webhook.pods.context import AgentSettings, WebhookSettings
from webhook.server import decisions, review

_VERBS = {"mutate": decisions.decide_mutate, "validate": decisions.decide_validate}
_CARDS = CardSizes(largest=MiB(16384), max_cards=2)
# By case: the cluster and the settings.
_CASES = {
    "a share": (Known(known_cards=_CARDS), WebhookSettings()),
    "a share with MPS and the agent": (
        Known(known_cards=_CARDS, scopes=frozenset({"card"})),
        WebhookSettings(share_agent=AgentSettings(image="registry.example/cardwise:1")),
    ),
}
# Modules and returns before there was a table of rules (8d2b42d), by case and verb.
_BEFORE = {
    ("a share", "mutate"): (25, 101),
    ("a share", "validate"): (19, 78),
    ("a share with MPS and the agent", "mutate"): (27, 123),
    ("a share with MPS and the agent", "validate"): (19, 96),
}
_OWN_PACKAGES = ("cardwise", "webhook")


def run(reviews: int) -> list[Row]:
    """Follow one review of each case and verb, and take the time of `reviews` more."""
    rows = []
    for case, (known, settings) in _CASES.items():
        manifest = pod(gpu_mem="8Gi")
        for verb, decide in _VERBS.items():
            text = body(manifest)
            seconds = [_measure(decide, text, known, settings) for _ in range(reviews)]
            trace, reviewed = _Trace(), review.decode(text)
            sys.setprofile(trace.on_event)
            decision = decide(reviewed, known, settings)
            sys.setprofile(None)
            assert decision.allowed, decision.message
            modules_before, returns_before = _BEFORE[case, verb]
            cells = {
                "modules": str(len(trace.modules)),
                "of the webhook": str(sum(name.startswith("webhook") for name in trace.modules)),
                "returns": str(trace.returns),
                "modules, 8d2b42d": str(modules_before),
                "returns, 8d2b42d": str(returns_before),
                "CPU p50": f"{timing.percentile(seconds, 50) * 1000:.2f} ms",
                "CPU p99": f"{timing.percentile(seconds, 99) * 1000:.2f} ms",
            }
            rows.append(Row(f"{verb}, {case}", cells))
            if verb == "mutate":
                manifest = patched(manifest, decision)
    return rows


class _Trace:
    """Counts calls of functions of Cardwise by module, and returns into another module."""

    def __init__(self) -> None:
        self.modules: Counter[str] = Counter()
        self.returns = 0

    def on_event(self, frame: FrameType, event: str, _argument: Any) -> None:
        module = _module_of(frame)
        if not module.startswith(_OWN_PACKAGES):
            return
        if event == "call":
            self.modules[module] += 1
        elif event == "return":
            caller = frame.f_back
            while caller is not None and not _module_of(caller).startswith(_OWN_PACKAGES):
                caller = caller.f_back
            self.returns += caller is not None and _module_of(caller) != module


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _measure(decide: decisions.Decide, text: bytes, known: Known, settings: WebhookSettings) -> float:
    """CPU seconds of one review, from its bytes to those of the answer."""
    started = time.thread_time()
    reviewed = review.decode(text)
    review.encode(reviewed.uid, decide(reviewed, known, settings))
    return time.thread_time() - started
