{{/* A drain takes one replica at a time. */}}
{{- define "cardwise.disruption" }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: cardwise-{{ .component }}
  namespace: {{ include "cardwise.namespace" .root }}
  labels: {{- include "cardwise.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{- include "cardwise.selector" . | nindent 6 }}
{{- end }}

{{/* By these ports and no others: `ports` by who is to reach them, as networkPolicies.sources names them. */}}
{{- define "cardwise.reached" }}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: cardwise-{{ .component }}
  namespace: {{ include "cardwise.namespace" .root }}
  labels: {{- include "cardwise.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels: {{- include "cardwise.selector" . | nindent 6 }}
  policyTypes: [Ingress]
  ingress:
    {{- range $who, $ports := .ports }}
    - ports:
        {{- range $ports }}
        - {protocol: TCP, port: {{ . }}}
        {{- end }}
      {{- with index $.root.Values.networkPolicies.sources $who }}
      from: {{- toYaml . | nindent 8 }}
      {{- end }}
    {{- end }}
{{- end }}
