{{/* The binding of a policy: refuse, everywhere. */}}
{{- define "cardwise.policyBinding" }}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ .name }}
  labels:
    {{- include "cardwise.labels" (dict "root" .root "component" "policies") | nindent 4 }}
spec:
  policyName: {{ .name }}
  validationActions: [Deny]
{{- end }}
