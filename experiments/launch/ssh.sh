#!/usr/bin/env bash
# Trains over machines that SSH reaches, one host on each:
#
#   experiments/launch/ssh.sh HOSTS --config FILE [ARGUMENT...]
#
# HOSTS is a file with a line for each host, host 0 first: where ssh finds it, then the IP address
# by which the other hosts reach it, on which it listens.
#
#   alice@belgium.example.org 10.88.0.1
#   bob@tokyo.example.org     10.88.0.2
#
# Keep strangers from their ports: firewall.sh, or wireguard.sh.
#
# The arguments go to skippipe_jax.train. From the environment: DIRECTORY, the checkout on every
# host (this one's path); PYTHON, the interpreter there (python); PORT, where host 0 listens
# (8476); GRACE, the seconds that a host may take to stop before it is killed (120).
#
# What host 3 prints is shown behind [host 3]. SIGINT (Ctrl-C) and SIGTERM stop all hosts after a
# last checkpoint, and so does whatever ends this script or its connections. When a host fails the
# others are stopped; the exit code is that of the first to fail.
set -euo pipefail

directory=${DIRECTORY:-$(cd "$(dirname "$0")/../.." && pwd)}
python=${PYTHON:-python}
port=${PORT:-8476}
grace=${GRACE:-120}
# So long do hosts have to tell by themselves which of them failed.
telling=5

hosts_file=${1:-}
if [[ ! -r $hosts_file || -d $hosts_file ]]; then
    echo "error: HOSTS = '$hosts_file': no file to read. Write ssh.sh HOSTS --config FILE" >&2
    exit 2
fi
shift
mapfile -t hosts < <(grep -Ev '^[[:space:]]*(#|$)' "$hosts_file")
if ((${#hosts[@]} == 0)); then
    echo "error: HOSTS = '$hosts_file': holds no host. Write a line for each: NAME ADDRESS" >&2
    exit 2
fi
for line in "${hosts[@]}"; do
    if [[ ! $line =~ ^[[:space:]]*[^[:space:]-][^[:space:]]*[[:space:]]+[0-9a-fA-F.:]+[[:space:]]*$ ]]; then
        echo "error: HOSTS = '$hosts_file': '$line' is not NAME ADDRESS. Write such a line" >&2
        exit 2
    fi
done
read -r _ address_of_host_0 <<< "${hosts[0]}"
# IPv6 addresses are written in brackets before a port.
if [[ $address_of_host_0 == *:* ]]; then
    address_of_host_0="[$address_of_host_0]"
fi

# The hosts train for as long as the writing end of this pipe is open.
pipe=$(mktemp -u)
mkfifo -m 600 "$pipe"
exec {go_on}<> "$pipe"
exec {listen}< "$pipe"
rm "$pipe"
stop_all() {
    telling=0
    exec {go_on}>&-
}
trap stop_all INT TERM

# Arguments as every shell reads them; bash's own quoting is for bash.
quoted() { printf "'%s' " "${@//\'/\'\\\'\'}"; }

start() {
    local index=$1 destination=$2 address=$3
    shift 3
    local train script
    train=$(quoted "$python" -m skippipe_jax.train "$@" \
        --coordinator "$address_of_host_0:$port" --hosts "${#hosts[@]}" --host-id "$index")
    # On the host, the end of the input (this script closed the pipe, or the connection broke) stops
    # the training. An asynchronous command has no other input than through a descriptor above 2.
    script="
        cd $(quoted "$directory") || exit
        exec 3<&0
        SKIPPIPE_BIND_ADDRESS=$address $train < /dev/null 3<&- &
        training=\$!
        {
            read -r _ <&3
            kill -TERM \$training
            sleep $grace
            kill -KILL \$training
        } > /dev/null 2>&1 &
        wait \$training
        code=\$?
        kill \$! 2> /dev/null
        exit \$code"
    # In the background, and without a terminal's signals: this script alone says when to stop.
    {
        ssh -o BatchMode=yes -o ServerAliveInterval=15 "$destination" "sh -c $(quoted "$script")" \
            <&"$listen" 2>&1 | sed -u "s/^/[host $index] /"
    } {go_on}>&- &
}

for index in "${!hosts[@]}"; do
    read -r destination address <<< "${hosts[index]}"
    start "$index" "$destination" "$address" "$@"
done

code=0
running=${#hosts[@]}
while ((running > 0)); do
    status=0
    wait -n -p ended || status=$?
    # A signal interrupts the wait before a host has ended.
    if [[ -z ${ended:-} ]]; then
        continue
    fi
    running=$((running - 1))
    if ((status != 0 && code == 0)); then
        code=$status
        sleep "$telling"
        stop_all
    fi
done
exit "$code"
