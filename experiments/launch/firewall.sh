#!/usr/bin/env bash
# Tells nft to let only the hosts of a run to its ports. On each host, as root:
#
#   experiments/launch/firewall.sh HOSTS TRANSFER_PORT | nft -f -
#
# HOSTS is the file with the addresses of all hosts that ssh.sh takes; TRANSFER_PORT stands in the
# configuration, as cluster.transfer_port: N^2 ports from there on for N hosts, those that may join
# later among them. From the environment: PORT, where host 0 listens (8476). Arrays, and collectives
# on CPUs, come by ports of the system's choice, so strangers are kept from these as well; what a
# host asks for itself comes back to it.
#
# It ends with the machine, or by: nft delete table inet skippipe-run
set -euo pipefail

# Ends the script because of a wrong input: its name and value, the problem, and the remedy.
fail() {
    echo "error: $1" >&2
    exit 2
}

port=${PORT:-8476}
hosts_file=${1:-}
transfer_port=${2:-}
if [[ ! -r $hosts_file || -d $hosts_file ]]; then
    fail "HOSTS = '$hosts_file': is not a readable file. Write firewall.sh HOSTS TRANSFER_PORT."
fi
if [[ ! $transfer_port =~ ^[1-9][0-9]{0,4}$ ]]; then
    fail "TRANSFER_PORT = '$transfer_port': is not a port. Write cluster.transfer_port of the run."
fi
addresses_4=()
addresses_6=()
while read -r name address _; do
    case $address in
        *:*) addresses_6+=("$address") ;;
        *.*) addresses_4+=("$address") ;;
        *) fail "HOSTS = '$hosts_file': '$name' has no address. Write a line NAME ADDRESS." ;;
    esac
done < <(grep -Ev '^[[:space:]]*(#|$)' "$hosts_file")
count=$((${#addresses_4[@]} + ${#addresses_6[@]}))
last=$((transfer_port + count * count - 1))
read -r first_of_system last_of_system < /proc/sys/net/ipv4/ip_local_port_range

# A set is written with commas.
listed() {
    local IFS=,
    echo "{ $* }"
}

echo "table inet skippipe-run"
echo "delete table inet skippipe-run"
echo "table inet skippipe-run {"
echo "    chain strangers {"
echo "        type filter hook input priority filter"
echo "        iifname lo accept"
echo "        ct state established,related accept"
if ((${#addresses_4[@]})); then
    echo "        ip saddr $(listed "${addresses_4[@]}") accept"
fi
if ((${#addresses_6[@]})); then
    echo "        ip6 saddr $(listed "${addresses_6[@]}") accept"
fi
for range in "$port" "$transfer_port-$last" "$first_of_system-$last_of_system"; do
    echo "        tcp dport $range drop"
done
echo "    }"
echo "}"
