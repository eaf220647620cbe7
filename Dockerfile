# One image for every role: `docker run IMAGE api`, `worker`, `engine`. torch from PyPI brings CUDA along; for machines
# without a GPU, --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu leaves that out.
FROM python:3.12-slim
ARG TORCH_INDEX=
WORKDIR /srv/reasoner
COPY . .
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints.txt -e ".[otel]" \
    && useradd --system --home-dir /srv/reasoner reasoner \
    # What numba compiles for the processor at the first start is kept beside its source.
    && chown -R reasoner kernels/cpu
USER reasoner
ENV REASONER_DATA_DIR=/tmp/reasoner
ENTRYPOINT ["reasoner"]
