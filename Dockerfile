# ddltool with all that its pages use, and torch for CPUs.
#   docker build -t ddltool .
#   docker run --rm --shm-size 1g -v "$PWD/demo:/data/ddltool-demo" ddltool            # the demo, about a minute
#   docker run --rm -v "$PWD:/data" ddltool predict zoo:resnet50_v1 --device A100
FROM python:3.11-slim
COPY constraints.txt /tmp/
RUN pip install --no-cache-dir -c /tmp/constraints.txt --index-url https://download.pytorch.org/whl/cpu torch
COPY . /tmp/source
RUN pip install --no-cache-dir -c /tmp/constraints.txt '/tmp/source[all]' && rm -rf /tmp/source
WORKDIR /data
ENTRYPOINT ["ddltool"]
CMD ["demo"]
