"""The webhook with certificates that it renews every ten seconds: `python rotatingwebhook.py OPTION...`."""

from datetime import timedelta

from tests.runtime.tls.certificates import lifetimes_for
from webhook import __main__ as command

PERIOD = timedelta(seconds=10)

if __name__ == "__main__":
    command.LIFETIMES, command.CHECK_SECONDS = lifetimes_for(PERIOD), PERIOD.total_seconds() / 5
    command.main()
