"""The table of rules is the whole truth: `webhook/rules.py`."""

import importlib
import pkgutil

import pytest

from webhook import pods, rules

MODULES = [importlib.import_module(f"webhook.pods.{module.name}") for module in pkgutil.iter_modules(pods.__path__)]
FUNCTIONS = [
    function
    for module in MODULES
    for function in vars(module).values()
    if getattr(function, "__module__", "") == module.__name__
]


@pytest.mark.parametrize(("word", "table"), [("mutate", rules.MUTATE), ("validate", rules.VALIDATE)])
def test_each_rule_is_in_the_table_once(word: str, table: tuple[rules.Rule, ...]) -> None:
    named = [function for function in FUNCTIONS if function.__name__.split("_")[0] == word]
    assert len(named) >= 10
    assert sorted(table, key=id) == sorted(named, key=id)


def test_advice_has_no_rules_of_its_own() -> None:
    assert set(rules.ADVISE) <= set(rules.VALIDATE)
