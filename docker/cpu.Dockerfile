# docker build -f docker/cpu.Dockerfile -t llmsuite:cpu .
# docker run --rm -it --shm-size=2g -v "$PWD:/workspace" llmsuite:cpu run recipes/llama/sft.json --smoke
FROM python:3.11-slim-bookworm

# g++ builds what Paddle's CPU wheel lacks, at the first run; libgomp is what Paddle runs threads with; steps are some 5%
# faster with the memory of tcmalloc than with glibc's
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libgomp1 libtcmalloc-minimal4 \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml hatch_build.py README.md CHANGELOG.md LICENSE /opt/llmsuite/
COPY llmsuite /opt/llmsuite/llmsuite
COPY recipes /opt/llmsuite/recipes
COPY data /opt/llmsuite/data
RUN pip install --no-cache-dir "/opt/llmsuite[cpu,data,plot,serve]" \
    && pip install --no-cache-dir --no-deps paddlenlp==3.0.0b4

WORKDIR /workspace
ENV LLMSUITE_CACHE=/workspace/.llmsuite LD_PRELOAD=libtcmalloc_minimal.so.4
EXPOSE 8000
ENTRYPOINT ["llmsuite"]
CMD ["doctor"]
