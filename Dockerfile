# Not built in CI. Runs and prepared text stay in two folders of yours, which Docker would create as root:
#   docker build -t normal-llama . && mkdir -p runs .cache
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD/runs:/normal-llama/runs" \
#       -v "$PWD/.cache:/normal-llama/.cache" normal-llama
# Linux builds of torch include CUDA: for a GPU, add --gpus all to docker run. Another index, such as that of torch's
# CPU-only builds, makes the image smaller: docker build --build-arg PIP_OPTIONS="--extra-index-url URL" .
FROM python:3.12-slim
# fast/ builds its kernels with the system's C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /normal-llama
ARG PIP_OPTIONS=""
COPY requirements.txt .
RUN pip install --no-cache-dir $PIP_OPTIONS -r requirements.txt
COPY . .
# For any user, with or without those folders. fast/ and Matplotlib need a home, and such a user has none.
RUN mkdir -m 1777 runs .cache
ENV HOME=/normal-llama/.cache
ENTRYPOINT ["python"]
CMD ["train.py"]
