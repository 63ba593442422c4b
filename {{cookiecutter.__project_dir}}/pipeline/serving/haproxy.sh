#!/bin/sh
# What Ray starts as HAProxy: HAPROXY itself, after these changes to the configuration that Ray wrote for it.
# - Statistics and metrics listen on every network; here each is a socket, in the folder of this cluster.
# - What haproxy_defaults.cfg and haproxy_frontend.cfg hold is added.
# - An error of HAProxy's own is plain text; here it has the shape of OpenAI's errors, as all others have.
here=${0%/*} config= previous=
for argument; do
    [ "$previous" = -f ] && config=$argument
    previous=$argument
done
folder=${config%/*}
if [ -n "$config" ]; then
    sed -i -e "/^frontend prometheus/,/mode/s#bind .*#bind unix@${folder%/*}/prometheus.sock mode 600#" \
        -e "/^listen stats/,/stats enable/s#bind .*#bind unix@${folder%/*}/stats.sock mode 600#" \
        -e "s#\(stats socket .*\) mode 666#\1 mode 600#" \
        -e "/^defaults/r $here/haproxy_defaults.cfg" \
        -e "/^frontend http_frontend/r $here/haproxy_frontend.cfg" \
        -e 's#return status 404 content-type text/plain .*#deny deny_status 404#' \
        -e 's#return status 503 .*"Ingress request router failed.*" hdr X-Serve-Reason [^ ]*#deny deny_status 503#' \
        "$config"
    body='{"error": {"message": "no replica answers at this moment", "type": "server_error", "param": null, "code": null}}'
    printf 'HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\nContent-Length: %s\r\n\r\n%s' \
        "$(printf %s "$body" | wc -c)" "$body" > "$folder/500.http"
fi
exec "$HAPROXY" "$@"
