{{- define "outrider.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "outrider.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains (include "outrider.name" .) .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "outrider.name" .) | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "outrider.instanceLabels" -}}
app.kubernetes.io/name: {{ include "outrider.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "outrider.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "outrider.instanceLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* The pods that answer, and not those of `helm test`. */}}
{{- define "outrider.selectorLabels" -}}
{{ include "outrider.instanceLabels" . }}
app.kubernetes.io/component: server
{{- end }}

{{- define "outrider.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "outrider.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "outrider.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default (printf "%s-%s" .Chart.AppVersion (ternary "cuda" "cpu" (gt (int .Values.gpu.count) 0))) .Values.image.tag }}
{{- end }}
{{- end }}

{{- /* The file that the server reads: settings, with what the chart decides. */}}
{{- define "outrider.config" -}}
{{- $config := deepCopy .Values.settings }}
{{- if .Values.model }}{{ $_ := set $config "model" .Values.model }}{{ end }}
{{- if .Values.speculative }}{{ $_ := set $config "speculative" .Values.speculative }}{{ end }}
{{- if .Values.tls.existingSecret }}
{{- $_ := set $config "ssl_certfile" "/tls/tls.crt" }}
{{- $_ := set $config "ssl_keyfile" "/tls/tls.key" }}
{{- end }}
{{- toPrettyJson $config }}
{{- end }}

{{- define "outrider.scheme" -}}
{{- ternary "HTTPS" "HTTP" (ne .Values.tls.existingSecret "") }}
{{- end }}

{{- define "outrider.drainSeconds" -}}
{{- ternary .Values.settings.drain_timeout 30 (hasKey .Values.settings "drain_timeout") | float64 | ceil | int }}
{{- end }}

{{- define "outrider.graceSeconds" -}}
{{- add (int .Values.drain.preStopSeconds) (int (include "outrider.drainSeconds" .)) (int .Values.drain.marginSeconds) }}
{{- end }}

{{- define "outrider.autoscaled" -}}
{{- if or .Values.autoscaling.hpa.enabled .Values.autoscaling.keda.enabled }}true{{ end }}
{{- end }}

{{- define "outrider.apiKeysSecret" -}}
{{- if .Values.apiKeys.existingSecret }}
{{- .Values.apiKeys.existingSecret }}
{{- else if .Values.apiKeys.values }}
{{- include "outrider.fullname" . }}
{{- end }}
{{- end }}

{{- define "outrider.apiKeysKey" -}}
{{- ternary .Values.apiKeys.key "api-keys" (ne .Values.apiKeys.existingSecret "") }}
{{- end }}

{{- /* Whether something is to be had from the hub: a name that is neither empty nor a path. */}}
{{- define "outrider.usesHub" -}}
{{- if not .Values.offline }}
{{- range list .Values.model (get .Values.speculative "model") (get .Values.settings "tokenizer") }}
{{- if and . (not (hasPrefix "/" (toString .))) }}true{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "outrider.oneWriterCache" -}}
{{- with .Values.cache.persistence }}
{{- if and .enabled (not .existingClaim) (not (has "ReadWriteMany" .accessModes)) }}true{{ end }}
{{- end }}
{{- end }}
