# syntax=docker/dockerfile:1
# Cardwise's images. All parts:   docker build -t cardwise .
#                    share agent: docker build -t cardwise-agent --target agent .
ARG PYTHON=3.11.14

FROM python:${PYTHON}-slim-bookworm AS build
WORKDIR /src
# First what changes seldom. The lock has the hash of every package.
COPY requirements/run.lock requirements/
RUN python -m venv /opt/cardwise \
 && /opt/cardwise/bin/pip install --no-cache-dir --no-compile --require-hashes --requirement requirements/run.lock
COPY pyproject.toml README.md LICENSE ./
COPY cardwise cardwise
COPY webhook webhook
COPY extender extender
COPY deviceplugin deviceplugin
COPY mps mps
RUN python -m venv /opt/hatch && /opt/hatch/bin/pip install --no-cache-dir hatchling==1.33.0 \
 && /opt/hatch/bin/python -m hatchling build --target wheel --directory /tmp/wheel \
 && /opt/cardwise/bin/pip install --no-cache-dir --no-compile --no-deps /tmp/wheel/*.whl
# The asynchronous client is half of `kubernetes`, and pip is for nobody in there. Compiled here: at run time nobody can
# write beside the sources, and every start would compile them anew.
RUN site=/opt/cardwise/lib/python3.11/site-packages \
 && /opt/cardwise/bin/pip uninstall --yes --quiet setuptools pip \
 && rm -rf $site/kubernetes/aio $site/kubernetes/docs \
 && python -m compileall -q -j 0 --invalidation-mode unchecked-hash $site

# The agent needs the standard library and some of ours.
FROM python:${PYTHON}-slim-bookworm AS agent
RUN pip uninstall --yes --quiet setuptools wheel pip
COPY --from=build /opt/cardwise/lib/python3.11/site-packages/cardwise/__init__.py /opt/cardwise/lib/python3.11/site-packages/cardwise/clock.py /opt/agent/cardwise/
COPY --from=build /opt/cardwise/lib/python3.11/site-packages/cardwise/core /opt/agent/cardwise/core
COPY --from=build /opt/cardwise/lib/python3.11/site-packages/cardwise/share /opt/agent/cardwise/share
COPY --from=build /opt/cardwise/lib/python3.11/site-packages/cardwise/gpus/mpsnode.py /opt/cardwise/lib/python3.11/site-packages/cardwise/gpus/__init__.py /opt/agent/cardwise/gpus/
COPY --from=build /opt/cardwise/lib/python3.11/site-packages/mps/__init__.py /opt/agent/mps/
COPY --from=build /opt/cardwise/lib/python3.11/site-packages/mps/agent /opt/agent/mps/agent
RUN printf '#!/usr/local/bin/python3 -ES\nimport sys\nsys.path.append("/opt/agent")\nfrom mps.agent.__main__ import main\nmain()\n' \
    > /usr/local/bin/cardwise-agent && chmod 755 /usr/local/bin/cardwise-agent
USER 65532:65532
ENTRYPOINT ["cardwise-agent"]

FROM python:${PYTHON}-slim-bookworm AS cardwise
RUN pip uninstall --yes --quiet setuptools wheel pip
COPY --from=build /opt/cardwise /opt/cardwise
# Before the image's own Python, so that `python3` of the chart's jobs is the one with our packages.
ENV PATH=/opt/cardwise/bin:$PATH PYTHONUNBUFFERED=1
USER 65532:65532
CMD ["cardwise", "--help"]
