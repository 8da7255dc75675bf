{{/* The right of a part to keep its own certificate in a Secret. `create` cannot be limited to a name. */}}
{{- define "cardwise.tlsRole" }}
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: cardwise-{{ .component }}-tls
  namespace: {{ include "cardwise.namespace" .root }}
  labels:
    {{- include "cardwise.labels" (dict "root" .root "component" .component) | nindent 4 }}
rules:
  - apiGroups: [""]
    resources: [secrets]
    verbs: [create]
  - apiGroups: [""]
    resources: [secrets]
    resourceNames: [{{ .secret }}]
    verbs: [get, update, patch]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: cardwise-{{ .component }}-tls
  namespace: {{ include "cardwise.namespace" .root }}
  labels:
    {{- include "cardwise.labels" (dict "root" .root "component" .component) | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: cardwise-{{ .component }}-tls
subjects: {{- .subject | nindent 2 }}
{{- end }}
