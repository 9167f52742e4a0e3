# docker build -f docker/gpu.Dockerfile -t llmsuite:gpu .
# docker run --rm -it --gpus all --shm-size=8g -v "$PWD:/workspace" llmsuite:gpu doctor --device gpu
# Neither built nor run yet: no machine with a GPU was at hand.
FROM nvidia/cuda:12.6.3-cudnn-runtime-ubuntu22.04

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends g++ libgomp1 python3 python3-pip \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml hatch_build.py README.md CHANGELOG.md LICENSE /opt/llmsuite/
COPY llmsuite /opt/llmsuite/llmsuite
COPY recipes /opt/llmsuite/recipes
COPY data /opt/llmsuite/data
RUN pip3 install --no-cache-dir --extra-index-url https://www.paddlepaddle.org.cn/packages/stable/cu126/ \
    "/opt/llmsuite[gpu,data,plot,serve]" \
    && pip3 install --no-cache-dir --no-deps paddlenlp==3.0.0b4

WORKDIR /workspace
ENV LLMSUITE_CACHE=/workspace/.llmsuite
EXPOSE 8000
ENTRYPOINT ["llmsuite"]
CMD ["doctor", "--device", "gpu"]
