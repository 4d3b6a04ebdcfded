{{- define "stream-merge.name" -}}
{{- if contains "stream-merge" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-stream-merge{{ end }}
{{- end }}

{{- define "stream-merge.selector" -}}
app.kubernetes.io/name: stream-merge
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "stream-merge.labels" -}}
labels:
  {{- include "stream-merge.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "stream-merge.metadata" -}}
name: {{ include "stream-merge.name" . }}
{{ include "stream-merge.labels" . }}
{{- end }}

{{- define "stream-merge.claim" -}}
{{ .Values.storage.existingClaim | default (printf "%s-data" (include "stream-merge.name" .)) }}
{{- end }}

{{- define "stream-merge.port" -}}
{{ dig "metrics" "port" 9108 .Values.job }}
{{- end }}

{{- define "stream-merge.scheme" -}}
{{- if dig "metrics" "certificate_file" "" .Values.job }}https{{ else }}http{{ end }}
{{- end }}

{{/* The job file. Probes and Prometheus reach the pod by its own address; a port that is not named may change. */}}
{{- define "stream-merge.job" -}}
{{- $port := include "stream-merge.port" . | int }}
{{- toYaml (merge (dict "metrics" (dict "host" "0.0.0.0" "port" $port)) .Values.job) }}
{{- end }}
