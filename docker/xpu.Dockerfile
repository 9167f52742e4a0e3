# docker build -f docker/xpu.Dockerfile --build-arg BASE=IMAGE -t llmsuite:xpu .
# IMAGE has the driver's libraries for Kunlun XPUs and Python 3.10 to 3.12, as Paddle's own images for XPU do.
# Neither built nor run yet: no machine with an XPU was at hand.
ARG BASE
FROM ${BASE}

COPY pyproject.toml hatch_build.py README.md CHANGELOG.md LICENSE /opt/llmsuite/
COPY llmsuite /opt/llmsuite/llmsuite
COPY recipes /opt/llmsuite/recipes
COPY data /opt/llmsuite/data
RUN pip3 install --no-cache-dir --extra-index-url https://www.paddlepaddle.org.cn/packages/stable/xpu-p800/ \
    "/opt/llmsuite[xpu,data,plot,serve]" \
    && pip3 install --no-cache-dir --no-deps paddlenlp==3.0.0b4

WORKDIR /workspace
ENV LLMSUITE_CACHE=/workspace/.llmsuite
EXPOSE 8000
ENTRYPOINT ["llmsuite"]
CMD ["doctor", "--device", "xpu"]
