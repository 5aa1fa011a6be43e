#!/usr/bin/env bash
# Trains over the TPU VMs of a pod slice, which find each other by the slice's metadata:
#
#   export NAME=my-slice ZONE=us-central2-b
#   experiments/launch/tpu_pod.sh install
#   experiments/launch/tpu_pod.sh train --config FILE --set run_dir=/mnt/shared/run [ARGUMENT...]
#   experiments/launch/tpu_pod.sh stop
#
# install copies this checkout to every worker and installs it there, with a new secret by which
# the workers know each other; train passes its arguments to skippipe_jax.train; stop, given in
# another terminal, ends a run after a last checkpoint. run_dir must be a folder that all workers
# share, such as a mounted Filestore instance.
set -euo pipefail

# Ends the script because of a wrong input: its name and value, the problem, and the remedy.
fail() {
    echo "error: $1" >&2
    exit 2
}

[[ -n ${NAME:-} ]] || fail "NAME = '': is missing. Export the name of the TPU slice."
[[ -n ${ZONE:-} ]] || fail "ZONE = '': is missing. Export the zone of the TPU slice."
cd "$(dirname "$0")/../.."

on_all_workers() {
    gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker=all --command="$1"
}

action=${1:-}
shift || true
case $action in
    install)
        git archive --prefix=skippipe-jax/ --output=/tmp/skippipe-jax.tar HEAD
        gcloud compute tpus tpu-vm scp /tmp/skippipe-jax.tar "$NAME:" --zone="$ZONE" --worker=all
        secret=$(mktemp)
        trap 'rm -f "$secret"' EXIT
        head -c 32 /dev/urandom | base64 > "$secret"
        gcloud compute tpus tpu-vm scp "$secret" "$NAME:skippipe-secret" --zone="$ZONE" --worker=all
        on_all_workers "chmod 600 skippipe-secret &&
            tar -xf skippipe-jax.tar && cd skippipe-jax &&
            sudo apt-get install -y python3.11-venv && python3.11 -m venv .venv &&
            .venv/bin/pip install -r requirements-tpu.txt"
        ;;
    train)
        on_all_workers "cd skippipe-jax &&
            exec env SKIPPIPE_SECRET_FILE=../skippipe-secret .venv/bin/python -m skippipe_jax.train --distributed ${*@Q}"
        ;;
    stop)
        # The brackets keep the pattern from matching the shell that looks for it.
        on_all_workers "pkill -TERM -f '[s]kippipe_jax.train'"
        ;;
    *) fail "ACTION = '$action': is unknown. Write tpu_pod.sh install, train or stop." ;;
esac
