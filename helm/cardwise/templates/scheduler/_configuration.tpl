{{/*
What kube-scheduler is told of the extender; as cardwise/core/api/schedulerconfig.py, which a test compares. `host` is how it
reaches the Service, `tls` the folder of ca.crt, client.crt and client.key there.
*/}}
{{- define "cardwise.scheduler.stanzas" -}}
{{- $tls := dict "insecure" false "caFile" (printf "%s/ca.crt" .tls) "certFile" (printf "%s/client.crt" .tls) "keyFile" (printf "%s/client.key" .tls) -}}
- urlPrefix: https://{{ .host }}:12345/gpushare-scheduler
  filterVerb: filter
  prioritizeVerb: prioritize
  preemptVerb: preempt
  weight: 100
  # It answers in milliseconds; one that hangs costs the scheduler this much for each pod that asks for a card.
  httpTimeout: 1s
  nodeCacheCapable: true
  ignorable: false
  enableHTTPS: true
  tlsConfig: {{- toYaml $tls | nindent 4 }}
  managedResources:
    - {name: aliyun.com/gpu-mem, ignoredByScheduler: false}
    - {name: cardwise.dev/gpu, ignoredByScheduler: false}
    - {name: cardwise.dev/place, ignoredByScheduler: true}
# Here pods of a gang wait for each other.
- urlPrefix: https://{{ .host }}:12346/gpushare-scheduler
  bindVerb: bind
  httpTimeout: 300s
  nodeCacheCapable: true
  ignorable: false
  enableHTTPS: true
  tlsConfig: {{- toYaml $tls | nindent 4 }}
  managedResources:
    - {name: cardwise.dev/share, ignoredByScheduler: false}
    - {name: cardwise.dev/bind, ignoredByScheduler: true}
{{- end }}
