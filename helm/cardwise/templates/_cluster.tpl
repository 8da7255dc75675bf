{{/*
The facts of the cluster on which an installation depends, as JSON; {} if helm does not read the cluster (`helm
template`, GitOps). They are looked up once and kept in `.Values.seen`, because lists of nodes and pods can be long.

  runtimeClasses   names of all RuntimeClasses
  nvidia           names of NVIDIA's RuntimeClasses
  controlPlane     names of nodes with the labels of scheduler.controlPlaneSelector
  schedulers       names of the mirror pods of kubeadm's kube-schedulers, which are static pods
  labelled         number of nodes with the labels that the node components select
  unlabelled       names of other nodes that offer nvidia.com/gpu
  wired            "true" if files/kubeadm.py has changed a kube-scheduler, which an annotation of its mirror pod shows
  enforced         the profile that Pod Security enforces in Cardwise's namespace; "" without a label for it
*/}}
{{- define "cardwise.cluster" -}}
{{- if not (hasKey .Values "seen") }}
{{- $seen := dict }}
{{- if lookup "v1" "Namespace" "" "kube-system" }}
{{- $classes := list }}
{{- $nvidia := list }}
{{- range (lookup "node.k8s.io/v1" "RuntimeClass" "" "").items }}
{{- $classes = append $classes .metadata.name }}
{{- if contains "nvidia" (printf "%s %s" .metadata.name .handler) }}{{ $nvidia = append $nvidia .metadata.name }}{{ end }}
{{- end }}
{{- $controlPlane := list }}
{{- $labelled := 0 }}
{{- $unlabelled := list }}
{{- $gpu := include "cardwise.nodes.labels" . | fromJson }}
{{- range $node := (lookup "v1" "Node" "" "").items }}
{{- $labels := $node.metadata.labels | default dict }}
{{- if eq (include "cardwise.labelled" (dict "labels" $labels "selector" $.Values.scheduler.controlPlaneSelector)) "true" }}
{{- $controlPlane = append $controlPlane $node.metadata.name }}
{{- end }}
{{- $is := false }}
{{- if $.Values.nodes.selector }}
{{- $is = eq (include "cardwise.labelled" (dict "labels" $labels "selector" $.Values.nodes.selector)) "true" }}
{{- else }}
{{- range $key, $values := $gpu }}
{{- if and (hasKey $labels $key) (or (not $values) (has (get $labels $key) $values)) }}{{ $is = true }}{{ end }}
{{- end }}
{{- end }}
{{- if $is }}
{{- $labelled = add1 $labelled }}
{{- else if ne (dig "status" "capacity" "nvidia.com/gpu" "0" $node | toString) "0" }}
{{- $unlabelled = append $unlabelled $node.metadata.name }}
{{- end }}
{{- end }}
{{- $schedulers := list }}
{{- $wired := "" }}
{{- range (lookup "v1" "Pod" "kube-system" "").items }}
{{- $annotations := .metadata.annotations | default dict }}
{{- if hasKey $annotations "cardwise-former-config" }}{{ $wired = "true" }}{{ end }}
{{- if and (hasPrefix "kube-scheduler-" .metadata.name) (hasKey $annotations "kubernetes.io/config.mirror") }}
{{- $schedulers = append $schedulers .metadata.name }}
{{- end }}
{{- end }}
{{- $own := lookup "v1" "Namespace" "" (include "cardwise.namespace" .) }}
{{- $seen = dict "runtimeClasses" $classes "nvidia" $nvidia "controlPlane" $controlPlane "schedulers" $schedulers "labelled" $labelled "unlabelled" $unlabelled "wired" $wired "enforced" (dig "metadata" "labels" "pod-security.kubernetes.io/enforce" "" $own) }}
{{- end }}
{{- $_ := set .Values "seen" $seen }}
{{- end }}
{{- toJson .Values.seen }}
{{- end }}

{{/* "true" if the node's `labels` contain every label of the `selector`. */}}
{{- define "cardwise.labelled" -}}
{{- $is := true }}
{{- range $key, $value := .selector }}
{{- if or (not (hasKey $.labels $key)) (ne (get $.labels $key | toString) $value) }}{{ $is = false }}{{ end }}
{{- end }}
{{- $is }}
{{- end }}

{{/*
The RuntimeClass of the node components; "" for the runtime's default. With auto it is NVIDIA's, if helm finds one in the
cluster. If helm finds several, and none is called nvidia, it is "" too, and templates/checks.yaml refuses the
installation.
*/}}
{{- define "cardwise.nodes.runtimeClass" -}}
{{- if ne .Values.nodes.runtimeClass "auto" }}
{{- .Values.nodes.runtimeClass }}
{{- else if not .Values.nodes.simulatedGPUs }}
{{- $classes := dig "nvidia" list (include "cardwise.cluster" . | fromJson) }}
{{- if has "nvidia" $classes }}nvidia{{ else if eq (len $classes) 1 }}{{ first $classes }}{{ end }}
{{- end }}
{{- end }}

{{/*
The image of kube-scheduler in the API server's version, without a provider's suffix (v1.37.2-gke.100, v1.37.2+k3s1).
*/}}
{{- define "cardwise.scheduler.image" -}}
registry.k8s.io/kube-scheduler:{{ regexFind "^v[0-9]+\\.[0-9]+\\.[0-9]+" .Capabilities.KubeVersion.Version }}
{{- end }}

{{/* A hint which scheduler.mode fits the cluster, as far as helm can read it. */}}
{{- define "cardwise.scheduler.fits" -}}
{{- $seen := include "cardwise.cluster" . | fromJson }}
{{- if not $seen }}
{{- else if and $seen.controlPlane $seen.schedulers }}
{{- printf "\nHere kube-scheduler is a static pod (%s), as kubeadm makes it: write scheduler.mode=kubeadm" (join ", " $seen.schedulers) }}
{{- else }}
{{- $why := ternary "no node is visible as a control plane of kubeadm" "kube-scheduler is no static pod in kube-system" (empty $seen.controlPlane) }}
{{- printf "\nHere %s, so kubeadm cannot work: write scheduler.mode=own,scheduler.image=%s" $why (include "cardwise.scheduler.image" .) }}
{{- if and (ne .Values.scheduler.mode "claims") (semverCompare ">=1.34.0-0" .Capabilities.KubeVersion.Version) }}
{{- print ", or scheduler.mode=claims" }}
{{- end }}
{{- end }}
{{- end }}
