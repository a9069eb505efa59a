# specdec on a CPU: `docker build -t specdec .`, then
#
#     docker run --rm specdec generate "Once upon a time"
#     docker run --rm -p 8000:8000 -e SPECDEC_API_KEY=secret specdec serve --host 0.0.0.0
#
# Models and the compiled decoder are kept in the volume /cache.
FROM python:3.12-slim@sha256:57cd7c3a7a273101a6485ba99423ee568157882804b1124b4dd04266317710de AS build
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir build && python -m build --wheel --outdir /dist

FROM python:3.12-slim@sha256:57cd7c3a7a273101a6485ba99423ee568157882804b1124b4dd04266317710de
# The decoder is compiled for the processor it runs on, once: g++ stays in the image.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY --from=build /src/constraints.txt /dist/*.whl /tmp/
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt --index-url https://download.pytorch.org/whl/cpu torch \
 && pip install --no-cache-dir --constraint /tmp/constraints.txt "$(ls /tmp/*.whl)[serve,plots]" && rm -f /tmp/*.whl /tmp/constraints.txt
RUN useradd --create-home specdec && mkdir /cache && chown specdec /cache
USER specdec
ENV XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --start-period=120s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["specdec"]
CMD ["serve", "--host", "0.0.0.0"]
