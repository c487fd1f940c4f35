# aserve on a CPU, with the demo model inside:
#   docker build -t aserve . && docker run -p 8000:8000 aserve
# Another model: docker run -p 8000:8000 -v /models:/models aserve serve /models/llama --host 0.0.0.0
FROM python:3.12-slim

# The CPU kernels are compiled for the machine that the container runs on, at first start.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /opt/aserve
COPY .ci/constraints.txt /tmp/constraints.txt
RUN pip install --no-cache-dir --no-deps -c /tmp/constraints.txt --index-url "${TORCH_INDEX}" torch

COPY pyproject.toml README.md LICENSE ./
COPY aserve ./aserve
RUN pip install --no-cache-dir -c /tmp/constraints.txt '.[redis]' && rm -rf build

RUN useradd --create-home --uid 1000 aserve
USER aserve
ENV ASERVE_CACHE=/home/aserve/.cache/aserve HF_HOME=/home/aserve/.cache/huggingface PYTHONUNBUFFERED=1
RUN python -c "from aserve.demo_model import find_demo_model; print(find_demo_model().path)"
VOLUME ["/home/aserve/.cache"]

EXPOSE 8000
# Alive is not ready: an orchestrator should route by /ready.
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["aserve"]
CMD ["serve", "--host", "0.0.0.0"]
