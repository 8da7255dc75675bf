{{/* Labels of every object; `component` is the part it belongs to. */}}
{{- define "cardwise.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
app.kubernetes.io/name: cardwise
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: cardwise
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* A user name as the API server knows a ServiceAccount of ours. */}}
{{- define "cardwise.user" -}}
system:serviceaccount:{{ .root.Values.namespace.name }}:{{ .name }}
{{- end }}

{{/* Subject of our role bindings. */}}
{{- define "cardwise.subject" -}}
- kind: ServiceAccount
  name: {{ .name }}
  namespace: {{ .root.Values.namespace.name }}
{{- end }}
