#!/bin/sh
# Run one learner in this terminal: learner.sh [RUN_FILE] [section.field=value ...]
# All roles must use the same broker address. To change it, set OFFBEAT_BROKER and OFFBEAT_HTTP.
set -eu
cd "$(dirname "$0")/../.."
run_file=${1:-recipes/spell_backward.toml}
[ $# -eq 0 ] || shift
exec "${OFFBEAT:-.venv/bin/offbeat}" learner "$run_file" \
    "broker.endpoint=${OFFBEAT_BROKER:-tcp://127.0.0.1:5755}" "broker.http=${OFFBEAT_HTTP:-127.0.0.1:5756}" "$@"
