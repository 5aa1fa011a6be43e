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
# Machines that do not reach the folder of a run join it, and are started again by that as well:
#
#   JOIN=10.88.0.1:8476 SECRET=secret experiments/launch/ssh.sh HOSTS [ARGUMENT...]
#
# JOIN says where hosts of the run listen, and the arguments go to skippipe join.
#
# The hosts know each other by a secret, which is made for this start and goes to them through ssh.
# Strangers can do harm by the ports of transfers all the same: firewall.sh, or wireguard.sh.
#
# The arguments go to skippipe_jax.train. From the environment: DIRECTORY, the checkout on every
# host (this one's path); PYTHON, the interpreter there (python); PORT, where host 0 listens
# (8476); GRACE, the seconds that a host may take to stop before it is killed (120); SECRET, a file
# here with the secret, which skippipe keygen has made.
#
# What host 3 prints is shown behind [host 3]. SIGINT (Ctrl-C) and SIGTERM stop all hosts after a
# last checkpoint, and so does whatever ends this script. A host whose connection breaks is told to
# stop as well, and one that is lost for this or another reason is started again alone, with --resume
# once the run has begun: a second later, and twice as much later each time that it ends within a
# minute, up to a minute. After a fault of its own (1, and other codes) that is 5 times at most; and
# when it has once stayed away, as it does then and after 2 and 130, the same counts for 75 and 143
# of the others. That a host cannot be reached at first, or finds a wrong input then, ends all.
#
# It ends when no host is left, with code 0 if one has trained to the end, else with that of the
# first that stayed away.
set -euo pipefail

directory=${DIRECTORY:-$(cd "$(dirname "$0")/../.." && pwd)}
python=${PYTHON:-python}
port=${PORT:-8476}
grace=${GRACE:-120}
# So long do hosts have to tell by themselves which of them failed.
telling=5
first_pause=1
longest_pause=60
# A host that has lived for so long has started well.
settled=60
most_faults=5
# The exit code of a host that has stopped as it was told.
stopped=143

# Ends the script because of a wrong input: its name and value, the problem, and the remedy.
fail() {
    echo "error: $1" >&2
    exit 2
}

hosts_file=${1:-}
if [[ ! -r $hosts_file || -d $hosts_file ]]; then
    fail "HOSTS = '$hosts_file': is not a readable file. Write ssh.sh HOSTS --config FILE."
fi
shift
mapfile -t hosts < <(grep -Ev '^[[:space:]]*(#|$)' "$hosts_file")
if ((${#hosts[@]} == 0)); then
    fail "HOSTS = '$hosts_file': lists no host. Write a line NAME ADDRESS for each host."
fi
for line in "${hosts[@]}"; do
    if [[ ! $line =~ ^[[:space:]]*[^[:space:]-][^[:space:]]*[[:space:]]+[0-9a-fA-F.:]+[[:space:]]*$ ]]; then
        fail "HOSTS = '$hosts_file': the line '$line' is not NAME ADDRESS. Correct this line."
    fi
done
read -r _ address_of_host_0 <<< "${hosts[0]}"
# IPv6 addresses are written in brackets before a port.
if [[ $address_of_host_0 == *:* ]]; then
    address_of_host_0="[$address_of_host_0]"
fi

join=${JOIN:-}
if [[ -n $join && -z ${SECRET:-} ]]; then
    fail "SECRET = '': is required with JOIN. Set the file with the secret of the run."
fi
if [[ -n ${SECRET:-} ]]; then
    if ! secret=$(head -n 1 "$SECRET" 2> /dev/null); then
        fail "SECRET = '$SECRET': cannot be read. Create it by skippipe keygen, or unset SECRET."
    fi
else
    secret=$(head -c 32 /dev/urandom | base64)
fi

# The hosts train for as long as the writing end of this pipe is open.
pipe=$(mktemp -u)
mkfifo -m 600 "$pipe"
exec {go_on}<> "$pipe"
exec {listen}< "$pipe"
rm "$pipe"
is_told= is_trained= misses_some=0
stop_all() {
    telling=0
    is_told=1
    exec {go_on}>&-
}
trap stop_all INT TERM

# Arguments as every shell reads them; bash's own quoting is for bash.
quoted() { printf "'%s' " "${@//\'/\'\\\'\'}"; }

# Whether the run has begun that these arguments of skippipe_jax.train are about.
has_begun='
import argparse, pathlib, sys
from skippipe_jax.cli import train
from skippipe_jax.config import load_config

parser = argparse.ArgumentParser()
train.add_arguments(parser)
arguments = parser.parse_args()
run_dir = pathlib.Path(load_config(arguments.config, arguments.set).run_dir)
sys.exit(not (run_dir / "config.yaml").exists())
'
arguments=("$@")

# Starts a host, for the first time or again, after so many seconds.
start() {
    local index=$1 pause=$2 destination address
    read -r destination address <<< "${hosts[index]}"
    local train training place= resumes= script again=
    if [[ -n $join ]]; then
        # Several addresses are several words.
        # shellcheck disable=SC2086
        train=$(quoted "$python" -m skippipe_jax join $join "${arguments[@]}")
        training="-m skippipe_jax[ ]join $join"
    else
        train=$(quoted "$python" -m skippipe_jax.train "${arguments[@]}")
        place=$(quoted --coordinator "$address_of_host_0:$port" --hosts "${#hosts[@]}" --host-id "$index")
        training="-m skippipe_jax[.]train .*:$port --hosts ${#hosts[@]} --host-id $index\$"
        resumes="if $(quoted "$python" -c "$has_begun" "${arguments[@]}") > /dev/null 2>&1; then
            resume=--resume
        fi"
    fi
    # Where a connection has broken, its training may still be at its end, or not know of it yet.
    if ((attempts[index] > 0)); then
        again="left() { pgrep -u \$(id -u) -f -- '$training'; }
        for old in \$(left); do tell \$old; done
        waited=0
        while left > /dev/null && [ \$waited -lt $grace ]; do
            sleep 1
            waited=\$((waited + 1))
        done
        for old in \$(left); do kill -KILL \$old; done
        $resumes"
    fi
    # On the host, the end of the input (this script closed the pipe, or the connection broke) stops
    # the training. An asynchronous command has no other input than through a descriptor above 2. It
    # is told to stop only once, whoever does so: the second time it would end at once. The secret
    # comes first, since everybody on a machine sees its command lines.
    script="
        cd $(quoted "$directory") || exit
        exec 3<&0
        read -r SKIPPIPE_SECRET <&3 || exit
        export SKIPPIPE_SECRET
        told=\${TMPDIR:-/tmp}/skippipe-told-\$(id -u)
        tell() { mkdir \$told-\$1 && kill -TERM \$1; } 2> /dev/null
        resume=
        $again
        SKIPPIPE_BIND_ADDRESS=$address $train \$resume $place < /dev/null 3<&- &
        training=\$!
        rmdir \$told-\$training 2> /dev/null
        {
            read -r _ <&3
            tell \$training
            sleep $grace
            kill -KILL \$training
        } > /dev/null 2>&1 &
        wait \$training
        code=\$?
        kill \$! 2> /dev/null
        rmdir \$told-\$training 2> /dev/null
        exit \$code"
    attempts[index]=$((attempts[index] + 1))
    began[index]=$((SECONDS + pause))
    # In the background, and without a terminal's signals: this script alone says when to stop.
    {
        if ((pause > 0)); then
            waited=0
            read -r -t "$pause" _ <&"$listen" || waited=$?
            # It was not the time that ended this, but the pipe.
            ((waited > 128)) || exit "$stopped"
        fi
        ssh -o BatchMode=yes -o ServerAliveInterval=15 "$destination" "sh -c $(quoted "$script")" \
            < <(printf '%s\n' "$secret" && exec cat <&"$listen") 2>&1 | sed -u "s/^/[host $index] /"
    } {go_on}>&- &
    index_of[$!]=$index
}

# Sets after how many seconds a host is started again that has ended with this code; fails if it is
# not started again.
comes_again() {
    local index=$1 status=$2 lived=$3
    if [[ -n $is_told || -n $is_trained ]]; then
        return 1
    fi
    local is_fault is_first=$((attempts[index] == 1 && lived < settled))
    case $status in
        0 | 2 | 130) return 1 ;;
        # Another host was lost, or the connection of one broke, while all were needed.
        75 | 143) is_fault=$((misses_some)) ;;
        # ssh itself: what could be reached once may be reached again.
        255) is_fault=0 ;;
        *) is_fault=$((status < 128)) ;;
    esac
    if ((is_first && (is_fault || status == 255))); then
        return 1
    fi
    faults[index]=$((faults[index] + is_fault))
    if ((faults[index] > most_faults)); then
        return 1
    fi
    local pause=$((lived < settled ? 2 * pauses[index] : 0))
    pause=$((pause > longest_pause ? longest_pause : pause))
    pauses[index]=$((pause < first_pause ? first_pause : pause))
}

declare -A index_of=()
declare -a attempts=() began=() pauses=() faults=()
for index in "${!hosts[@]}"; do
    attempts[index]=0 pauses[index]=0 faults[index]=0
done
for index in "${!hosts[@]}"; do
    start "$index" 0
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
    index=${index_of[$ended]}
    lived=$((SECONDS - began[index]))
    if comes_again "$index" "$status" "$lived"; then
        echo "host $index ended with exit code $status: restart in ${pauses[index]} s"
        start "$index" "${pauses[index]}"
        continue
    fi
    running=$((running - 1))
    if ((status == 0)); then
        is_trained=1
        continue
    fi
    misses_some=1
    if ((code == 0)); then
        code=$status
    fi
    # What fails at once would be waited for by all others.
    if [[ -z $is_told ]] && ((attempts[index] == 1 && lived < settled)); then
        sleep "$telling"
        stop_all
    fi
done
if [[ -n $is_trained ]]; then
    code=0
fi
exit "$code"
