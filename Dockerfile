# One image for every role: `docker run IMAGE api`, `worker`, `engine`. torch from PyPI brings CUDA and Triton along; for
# machines without a GPU, --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu leaves both out.
# `docker build --target test -t reasoner-test .` makes an image for `make test`, its command, and `make demo`.
FROM python:3.12-slim AS base
# Triton compiles what launches its kernels in C; the headers of Python are in /usr/local/include.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# The home folder is for compiled kernels: a volume there keeps them. Nothing else need be written to, except /tmp.
RUN useradd --system --create-home --home-dir /var/cache/reasoner reasoner
ENV XDG_CACHE_HOME=/var/cache/reasoner TRITON_CACHE_DIR=/var/cache/reasoner/triton REASONER_DATA_DIR=/tmp/reasoner
WORKDIR /srv/reasoner
ARG TORCH_INDEX=

FROM base AS test
RUN apt-get update \
    && apt-get install -y --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/* \
    && chown reasoner .
COPY --chown=reasoner . .
USER reasoner
RUN PIP_NO_CACHE_DIR=1 PIP_EXTRA_INDEX_URL="$TORCH_INDEX" make .venv/.installed-test
CMD ["make", "test"]

# No kernel is compiled here: that is done for the processor of the machine that runs them, at the first start.
FROM base AS service
COPY . .
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints.txt -e ".[engine,otel,mcp]"
USER reasoner
ENTRYPOINT ["reasoner"]
