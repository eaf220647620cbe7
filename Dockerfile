# Three images, all of them for one user without root and a read-only file system:
#
#   docker build -t reasoner .                                          API, workers, command line: no torch
#   docker build --target engine-cuda -t reasoner-engine .              the engine, on NVIDIA GPUs and on CPUs
#   docker build --target engine-cpu -t reasoner-engine .               the engine on CPUs alone, several GB smaller
#   docker build --target test -t reasoner-test .                       for `make test`, its command, and `make demo`
#
# --build-arg PYTHON_IMAGE=python:3.12-slim@sha256:… pins the base to what you have checked.
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS base
# Volumes get their owner from these folders: compiled kernels, and uploaded files. Nothing else need be written to, except /tmp.
RUN useradd --uid 10001 --user-group --create-home --home-dir /var/cache/reasoner reasoner \
    && install --directory --owner=reasoner --group=reasoner /files
ENV XDG_CACHE_HOME=/var/cache/reasoner TRITON_CACHE_DIR=/var/cache/reasoner/triton REASONER_DATA_DIR=/tmp/reasoner
WORKDIR /srv/reasoner

# Triton compiles what launches its kernels in C; the headers of Python are in /usr/local/include.
FROM base AS compiler
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

FROM compiler AS test
ARG TORCH_INDEX=
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/* \
    && chown reasoner .
COPY --chown=10001:10001 . .
USER 10001:10001
RUN PIP_NO_CACHE_DIR=1 PIP_EXTRA_INDEX_URL="$TORCH_INDEX" make .venv/.installed-test
CMD ["make", "test"]

# No kernel is compiled here: that is done for the processor of the machine that runs them, at the first start.
FROM compiler AS engine-cpu
COPY . .
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt -e ".[engine,otel]"
USER 10001:10001
ENTRYPOINT ["reasoner"]
CMD ["engine"]

# torch from PyPI brings CUDA and Triton along.
FROM compiler AS engine-cuda
COPY . .
RUN pip install --no-cache-dir -c constraints.txt -e ".[engine,otel]"
USER 10001:10001
ENTRYPOINT ["reasoner"]
CMD ["engine"]

# Bytecode of what is imported alone: that of all modules, such as SymPy's tests, would be half as much again.
FROM base AS service
COPY . .
RUN pip install --no-cache-dir --no-compile -c constraints.txt -e ".[otel,mcp]" \
    && python -c "import api.cli.main, api.roles.serve, math_verify"
USER 10001:10001
ENTRYPOINT ["reasoner"]
CMD ["api"]
