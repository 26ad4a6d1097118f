#!/usr/bin/env bash
# A policy trained as a Ray job, on a cluster of the image that the Dockerfile beside this file makes:
#   configs/cluster/ray-job.sh data.path=gs://YOUR_BUCKET/dataset train.output=gs://YOUR_BUCKET/runs/policy [key=value ...]
# Ray's dashboard, on which jobs are submitted, is at RAY_API_SERVER_ADDRESS, or forwarded to this machine.
set -euo pipefail
code=/home/ray/rfstream
exec ray job submit --address "${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}" -- \
  python "$code/pipelines/train_episodes.py" --config "$code/configs/cluster/episodes.yaml" "$@"
