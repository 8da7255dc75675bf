# syntax=docker/dockerfile:1
# Cardwise's images. All parts:   docker build -t cardwise .
#                    share agent: docker build -t cardwise-agent --target agent .
# The Python that all tests run on, also those on a real cluster. No gain by 3.14 was seen.
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

# The agent is pulled to every node that runs pods with MPS: it has what it imports, and nothing else.
FROM python:${PYTHON}-slim-bookworm AS agentroot
COPY release/agentroot.py /src/
RUN --mount=type=bind,from=build,source=/opt/cardwise/lib/python3.11/site-packages,target=/site \
    mkdir /out && python /src/agentroot.py /out /site && chroot /out cardwise-agent --help > /dev/null

FROM scratch AS agent
COPY --from=agentroot /out /
ENV PATH=/usr/local/bin
USER 65532:65532
ENTRYPOINT ["cardwise-agent"]

FROM python:${PYTHON}-slim-bookworm AS cardwise
RUN pip uninstall --yes --quiet setuptools wheel pip
COPY --from=build /opt/cardwise /opt/cardwise
# Before the image's own Python, so that `python3` of the chart's jobs is the one with our packages.
# The last: where some hosts have the driver's programs, which come into the container by that path. NVIDIA's images
# of CUDA look there, too.
ENV PATH=/opt/cardwise/bin:$PATH:/usr/local/nvidia/bin PYTHONUNBUFFERED=1
USER 65532:65532
CMD ["cardwise", "--help"]
