"""The table of rules is the whole truth: `webhook/rules.py`."""

import importlib
import pkgutil

import pytest

from webhook import pods, rules

MODULES = [importlib.import_module(f"webhook.pods.{module.name}") for module in pkgutil.iter_modules(pods.__path__)]


@pytest.mark.parametrize(("function", "table"), [("mutate", rules.MUTATE), ("validate", rules.VALIDATE)])
def test_each_rule_is_in_the_table_once(function: str, table: tuple[object, ...]) -> None:
    names = [module.__name__ for module in MODULES if hasattr(module, function)]
    assert sorted(rule.__name__ for rule in table) == sorted(names)  # type: ignore[attr-defined]


def test_advice_has_no_rules_of_its_own() -> None:
    assert set(map(id, rules.ADVISE)) <= set(map(id, rules.VALIDATE))
