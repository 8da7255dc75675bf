"""Mounts the hook into containers with a share; it makes Python frameworks respect the share.

The share agent provides the files of the hook in a volume of the pod. So the hook needs neither an own image nor access
to the node.
"""

from typing import Final

from cardwise import share
from cardwise.core.api import names, shareagent
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.core.values.wording import quote_text
from webhook.pods.pod import PodUnderReview

ON, OFF = "on", "off"
FIELD: Final = f"metadata.annotations[{names.FRAMEWORKS}]"
_PYTHON_PATH: Final = "PYTHONPATH"

HOOK_MOUNT: Final[Json] = {
    "name": shareagent.VOLUME_NAME,
    "mountPath": share.MOUNT,
    "subPath": shareagent.HOOK_FOLDER,
    "readOnly": True,
}


def normalize_frameworks(text: str, field: str = FIELD) -> str | None:
    """The frameworks that the hook handles: None for none, `on` for all, or names separated by commas. Raises
    InvalidRequest.
    """
    if text in (ON, OFF):
        return None if text == OFF else ON
    framework_names = [name.strip() for name in text.split(",")]
    unknown_names = [name for name in framework_names if name not in share.FRAMEWORKS]
    if unknown_names:
        known = ", ".join(share.FRAMEWORKS)
        raise InvalidRequest(
            field,
            f"{quote_text(unknown_names[0])} is not a framework of the hook",
            f"write on, off, or some of: {known}",
        )
    return ",".join(dict.fromkeys(framework_names))


def read_hook(pod: PodUnderReview) -> str | None:
    """The frameworks that the pod's hook handles, as `normalize_frameworks` returns them. Raises InvalidRequest.

    None for a pod with whole cards only, which needs no hook.
    """
    text = pod.annotations.get(names.FRAMEWORKS)
    hook = normalize_frameworks(text) if text is not None else None
    return hook if any(not card.whole for card in pod.cards.values()) else None


def add_hook_to_environment(entries: list[Json], hook: str, path: str) -> tuple[list[Json], tuple[str, ...]]:
    """The entries of a container with the hook, and warnings. The container's own PYTHONPATH is kept, with the hook's
    path at its end.
    """
    present_names = {entry["name"] for entry in entries}
    hook_entries = (
        [] if hook == ON or share.ENV_FRAMEWORKS in present_names else [{"name": share.ENV_FRAMEWORKS, "value": hook}]
    )
    if _PYTHON_PATH not in present_names:
        return [*entries, *hook_entries, {"name": _PYTHON_PATH, "value": share.MOUNT}], ()
    if any(entry["name"] == _PYTHON_PATH and entry.get("valueFrom") for entry in entries):
        warning = (
            f"{path}.env: {_PYTHON_PATH} comes from a ConfigMap, Secret or field, so the hook of {names.FRAMEWORKS} is "
            "not added to it"
        )
        return [*entries, *hook_entries], (f"{warning}; add {share.MOUNT} to it",)
    return [*(_append_path(entry) if entry["name"] == _PYTHON_PATH else entry for entry in entries), *hook_entries], ()


def _append_path(entry: Json) -> Json:
    path = entry.get("value") or ""
    if share.MOUNT in path.split(":"):
        return entry
    return entry | {"value": f"{path}:{share.MOUNT}" if path else share.MOUNT}
