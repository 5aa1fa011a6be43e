#!/usr/bin/env bash
# Makes the configurations of a private network, by WireGuard, in which every site reaches every
# other directly:
#
#   experiments/launch/wireguard.sh FOLDER HOST:PORT HOST:PORT...
#
# Each HOST:PORT is where the other sites reach one site by UDP. FOLDER/0/wg0.conf is for the first,
# which will be 10.88.0.1 in the private network, and so on (NETWORK=10.99.0 chooses another). A
# file holds its site's private key: bring it there safely, as /etc/wireguard/wg0.conf, delete it
# here, and begin with: wg-quick up wg0
#
# Linux answers for each of its addresses on every interface: a neighbour in a site's own network
# could send what is for 10.88.0.1 to that site's other address. So wg0.conf also drops all that
# comes for the private network by another way than wg0. That needs nft (the package nftables).
set -euo pipefail
umask 077

# Ends the script because of a wrong input: its name and value, the problem, and the remedy.
fail() {
    echo "error: $1" >&2
    exit 2
}

folder=${1:-}
if [[ -z $folder ]]; then
    fail "FOLDER = '': is missing. Write wireguard.sh FOLDER HOST:PORT HOST:PORT..."
fi
shift
endpoints=("$@")
network=${NETWORK:-10.88.0}
if ((${#endpoints[@]} < 2 || ${#endpoints[@]} > 254)); then
    fail "HOST:PORT = '$*': must be 2 to 254 sites. Write HOST:PORT for each site."
fi
if [[ -e $folder ]]; then
    fail "FOLDER = '$folder': already exists, and its keys may be in use. Name a new folder."
fi

# Rules for nft, where wg-quick writes wg0 for %i; those that a start left that failed come again.
only_through_wireguard() {
    local table="table ip skippipe-%i" chain="type filter hook prerouting priority raw"
    echo "add $table; delete $table; $table {" \
        "chain others { $chain; iifname != { lo, %i } ip daddr $network.0/24 drop; }; }"
}

private_keys=()
public_keys=()
for _ in "${endpoints[@]}"; do
    key=$(wg genkey)
    private_keys+=("$key")
    public_keys+=("$(wg pubkey <<< "$key")")
done

for site in "${!endpoints[@]}"; do
    mkdir -p "$folder/$site"
    {
        echo "[Interface]"
        echo "PrivateKey = ${private_keys[site]}"
        echo "Address = $network.$((site + 1))/24"
        echo "ListenPort = ${endpoints[site]##*:}"
        # Before there is an address to reach; without nft, wg-quick ends here.
        echo "PreUp = nft '$(only_through_wireguard)'"
        echo "PostDown = nft 'delete table ip skippipe-%i'"
        for peer in "${!endpoints[@]}"; do
            if ((peer != site)); then
                echo
                echo "[Peer]"
                echo "PublicKey = ${public_keys[peer]}"
                echo "Endpoint = ${endpoints[peer]}"
                echo "AllowedIPs = $network.$((peer + 1))/32"
                # Keeps the way open through a router that translates addresses.
                echo "PersistentKeepalive = 25"
            fi
        done
    } > "$folder/$site/wg0.conf"
    echo "$folder/$site/wg0.conf is for ${endpoints[site]%:*}, SKIPPIPE_BIND_ADDRESS=$network.$((site + 1))"
done
