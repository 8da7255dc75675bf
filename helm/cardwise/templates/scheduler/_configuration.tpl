{{/*
The extender's stanzas in kube-scheduler's configuration; a test compares them with
cardwise/core/api/schedulerconfig.py. `host`: the address by which kube-scheduler reaches the Service. `tls`: the folder
with ca.crt, client.crt and client.key.
*/}}
{{- define "cardwise.scheduler.stanzas" -}}
{{- $tls := dict "insecure" false "caFile" (printf "%s/ca.crt" .tls) "certFile" (printf "%s/client.crt" .tls) "keyFile" (printf "%s/client.key" .tls) -}}
- urlPrefix: https://{{ .host }}:12345/gpushare-scheduler
  filterVerb: filter
  prioritizeVerb: prioritize
  preemptVerb: preempt
  weight: 100
  # The extender answers in milliseconds. An extender that hangs delays the scheduler by this time for each pod that
  # requests a GPU.
  httpTimeout: 1s
  nodeCacheCapable: true
  ignorable: false
  enableHTTPS: true
  tlsConfig: {{- toYaml $tls | nindent 4 }}
  managedResources:
    - {name: aliyun.com/gpu-mem, ignoredByScheduler: false}
    - {name: cardwise.dev/gpu, ignoredByScheduler: false}
    - {name: cardwise.dev/place, ignoredByScheduler: true}
# On this port the pods of a gang wait for each other.
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
